#include "attention/device/page_choice.hpp"

#include <algorithm>
#include <kvzap/core/keep_list.hpp>

#include "base/launch.hpp"
#include "base/scratch.hpp"
#include "base/team.hpp"
#include "linalg/device/lane_rows.hpp"

namespace kvzap::attention {
namespace {

// Pages whose bounds a team adds up, and its threads and lanes.
constexpr int pages_at_once = 32;
constexpr base::TeamShape score_shape{8, 32};
constexpr base::TeamShape order_shape{512, 1};

std::int64_t blocks_of(std::int64_t pages) { return (pages + pages_at_once - 1) / pages_at_once; }

/// The spans of a launch.
struct ChoosingSpans {
  const ChoosingSpan* many;  // replaces `one` unless null
  ChoosingSpan one;
  std::int32_t count;

  KOKKOS_INLINE_FUNCTION const ChoosingSpan& operator[](int i) const {
    return many ? many[i] : one;
  }
};

/// Writes the largest score that a key of each full page can have with a query of the group. A team
/// takes some pages of a head. Bounds of quantised keys are rotated, and so are the queries then.
template <class Bound>
struct ScorePages {
  ChoosingSpans spans;
  std::int64_t head_stride, dim_stride;  // of queries
  std::int32_t heads, group, dim, page_rows, blocks, scratch_bytes;
  bool is_rotated;

  KOKKOS_FUNCTION void operator()(const base::TeamMember& team) const {
    const int rank = team.league_rank();
    const ChoosingSpan& span = spans[rank / (heads * blocks)];
    const int head = rank / blocks % heads;
    const int begin = rank % blocks * pages_at_once;
    const auto own = static_cast<int>(span.retained[head] / page_rows);
    const int end = begin + pages_at_once < own ? begin + pages_at_once : own;
    if (begin >= end) return;
    float* const query =
        static_cast<float*>(team.team_scratch(0).get_shmem_aligned(scratch_bytes, 16));
    for (int g = 0; g < group; ++g) {
      const float* const source = span.queries + (std::int64_t{head} * group + g) * head_stride;
      Kokkos::parallel_for(Kokkos::TeamThreadRange(team, 1), [&](int) {
        const linalg::LaneLoops loops{team};
        loops.each(dim, [&](int d) { query[d] = source[d * dim_stride]; });
        if (is_rotated) linalg::rotate_row(loops, query, dim);
      });
      team.team_barrier();
      Kokkos::parallel_for(Kokkos::TeamThreadRange(team, begin, end), [&](int page) {
        // RaggedLayer::page_bounds
        const PageId id = span.pages[head * span.pages_stride + page];
        const auto* const bounds =
            reinterpret_cast<const Bound*>(span.metadata[id] + page_rows * page_metadata_row_bytes);
        float bound = 0;
        Kokkos::parallel_reduce(
            Kokkos::ThreadVectorRange(team, dim),
            [&](int d, float& sum) {
              // Both products, so that a bound that is not a number shows.
              const float x = query[d];
              sum += (x > 0 ? x : 0.0f) * static_cast<float>(bounds[d]) +
                     (x > 0 ? 0.0f : x) * static_cast<float>(bounds[dim + d]);
            },
            bound);
        Kokkos::single(Kokkos::PerThread(team), [&] {
          float& score = span.scores[std::int64_t{head} * span.full + page];
          // Not a number if a key is not finite.
          const float largest = bound == bound ? bound : -minus_infinity;
          if (g == 0 || largest > score) score = largest;
        });
      });
      team.team_barrier();
    }
  }
};

/// Lists the chosen pages of a head in their order, then the page after the full ones. One team a
/// head of a span, in time proportional to its pages.
struct ListPages {
  static constexpr int bins = 256;  // of eight bits of a key
  static constexpr int scratch_bytes = (bins + 2) * static_cast<int>(sizeof(int));

  ChoosingSpans spans;
  std::int32_t heads, page_rows;

  KOKKOS_FUNCTION void operator()(const base::TeamMember& team) const {
    const ChoosingSpan& span = spans[team.league_rank() / heads];
    const int head = team.league_rank() % heads;
    const std::int64_t rows = span.retained[head];
    const auto own = static_cast<int>(rows / page_rows);
    const auto count = static_cast<int>(span.read.of(own));
    const float* const of_head = span.scores + std::int64_t{head} * span.full;
    const PageId* const pages = span.pages + head * span.pages_stride;
    PageId* const listed = span.listed + std::int64_t{head} * span.width;
    auto* const counts =
        static_cast<int*>(team.team_scratch(0).get_shmem_aligned(int{scratch_bytes}, 16));
    // The last chosen key, and the chosen pages with it: the first ones.
    std::uint32_t last = 0;
    int ties = count;
    for (int shift = 24; shift >= 0 && count > 0; shift -= 8) {
      find_bits(team, of_head, own, shift, counts, last, ties);
    }
    // Pages with larger keys and, in the low half, ties.
    Kokkos::parallel_scan(
        Kokkos::TeamThreadRange(team, own), [&](int page, std::int64_t& before, bool is_final) {
          const std::uint32_t key = selection::key_of_finite(of_head[page]);
          const auto ties_before = static_cast<int>(before & 0xffffffff);
          if (is_final && (key > last || (key == last && ties_before < ties))) {
            const int place =
                static_cast<int>(before >> 32) + (ties_before < ties ? ties_before : ties);
            listed[place] = pages[page];
          }
          before += key > last ? std::int64_t{1} << 32 : key == last ? 1 : 0;
        });
    Kokkos::single(Kokkos::PerTeam(team), [&] {
      const std::int64_t rest = rows % page_rows;
      if (rest > 0) listed[count] = pages[own];
      span.listed_rows[head] = std::int64_t{count} * page_rows + rest;
    });
  }

  /// Adds the next eight bits to the key of the page that is `left`-th among those whose key begins
  /// as `key` does. Sets `left` to its place among those that also have the new bits.
  KOKKOS_INLINE_FUNCTION void find_bits(const base::TeamMember& team, const float* of_head, int own,
                                        int shift, int* counts, std::uint32_t& key,
                                        int& left) const {
    int* const found = counts + bins;
    const std::uint32_t known = shift == 24 ? 0 : ~std::uint32_t{0} << (shift + 8);
    Kokkos::parallel_for(Kokkos::TeamVectorRange(team, int{bins}),
                         [&](int bin) { counts[bin] = 0; });
    team.team_barrier();
    Kokkos::parallel_for(Kokkos::TeamVectorRange(team, own), [&](int page) {
      const std::uint32_t other = selection::key_of_finite(of_head[page]);
      if (((other ^ key) & known) == 0) Kokkos::atomic_add(&counts[other >> shift & (bins - 1)], 1);
    });
    team.team_barrier();
    Kokkos::parallel_scan(Kokkos::TeamThreadRange(team, int{bins}),
                          [&](int i, int& before, bool is_final) {
                            const int bin = bins - 1 - i;
                            if (is_final && before < left && before + counts[bin] >= left) {
                              found[0] = bin;
                              found[1] = left - before;
                            }
                            before += counts[bin];
                          });
    team.team_barrier();
    key |= static_cast<std::uint32_t>(found[0]) << shift;
    left = found[1];
  }
};

/// Launches both kernels for spans whose heads have at most `blocks` blocks of full pages.
void choose_pages(const ExecutionSpace& exec, const ChoosingSpans& spans, std::int64_t blocks,
                  const AttentionCall& call, const PageFormat& format, int page_rows) {
  const auto with_bounds = [&](auto zero) {
    const ScorePages<decltype(zero)> kernel{spans,
                                            static_cast<std::int64_t>(call.queries.stride(1)),
                                            static_cast<std::int64_t>(call.queries.stride(2)),
                                            call.kv_heads,
                                            call.group,
                                            call.dim,
                                            page_rows,
                                            static_cast<std::int32_t>(blocks),
                                            static_cast<std::int32_t>(call.dim * sizeof(float)),
                                            format.quantised()};
    static_assert(sizeof(kernel) <= base::most_arguments, "Kokkos would wait");
    base::parallel_for("kvzap::attention::score_pages",
                       base::team_policy(exec, spans.count * call.kv_heads * blocks, score_shape,
                                         kernel, [&](int) { return call.dim * sizeof(float); }),
                       kernel);
  };
  if (format.quantised()) {
    with_bounds(bfloat16());
  } else {
    with_value_type(call.dtype(), with_bounds);
  }
  const ListPages list{spans, call.kv_heads, page_rows};
  static_assert(sizeof(list) <= base::most_arguments, "Kokkos would wait");
  base::parallel_for(
      "kvzap::attention::list_pages",
      base::team_policy(exec, std::int64_t{spans.count} * call.kv_heads, order_shape, list,
                        [](int) { return static_cast<std::size_t>(ListPages::scratch_bytes); }),
      list);
}

}  // namespace

const std::vector<AttentionSpan>& DevicePageChoice::operator()(
    const ExecutionSpace& exec, const std::vector<AttentionSpan>& spans,
    const AttentionCall& call) {
  const Sizes sizes = find_choosing(spans, call.kv_heads);
  if (m_places.empty()) return spans;
  reserve(sizes);
  m_spans = spans;
  for (const Place& place : m_places) {
    const CachedLayer& layer = m_spans[place.span].cached;
    const ChoosingSpans one{nullptr, let_choose(place, call), 1};
    choose_pages(exec, one, blocks_of(place.full), call, layer.format, layer.page_rows);
  }
  return m_spans;
}

DevicePageChoice::Sizes DevicePageChoice::find_choosing(const std::vector<AttentionSpan>& spans,
                                                        int kv_heads) {
  m_places.clear();
  Sizes sizes;
  for (std::size_t s = 0; s < spans.size(); ++s) {
    const AttentionSpan& span = spans[s];
    if (!span.cached.has_bounds || span.queries != 1) continue;
    Place place{static_cast<int>(s), 0, 0, sizes};
    bool chooses = false;
    for (int head = 0; head < kv_heads; ++head) {
      const std::int64_t full = span.cached.bounds(head) / span.cached.page_rows;
      const std::int64_t read = span.read_pages.of(full);
      chooses = chooses || read < full;
      place.full = std::max(place.full, full);
      place.width = std::max(place.width, read + 1);
    }
    if (!chooses) continue;
    sizes.pages += kv_heads * place.full;
    sizes.entries += kv_heads * place.width;
    sizes.heads += kv_heads;
    m_places.push_back(place);
  }
  m_bounds.resize(sizes.heads);
  return sizes;
}

ChoosingSpan DevicePageChoice::let_choose(const Place& place, const AttentionCall& call) {
  AttentionSpan& span = m_spans[place.span];
  CachedLayer& layer = span.cached;
  PageId* const listed = m_table.data() + place.first.entries;
  std::int64_t* const rows = m_retained.data() + place.first.heads;
  const ChoosingSpan choosing{layer.metadata_addresses.data(),
                              layer.page_table.data(),
                              static_cast<std::int64_t>(layer.page_table.stride(0)),
                              layer.retained.data(),
                              call.queries.data() + span.first_query * call.queries.stride(0),
                              m_scores.data() + place.first.pages,
                              listed,
                              rows,
                              span.read_pages,
                              static_cast<std::int32_t>(place.full),
                              static_cast<std::int32_t>(place.width)};
  std::int64_t* const bounds = m_bounds.data() + place.first.heads;
  for (int head = 0; head < call.kv_heads; ++head) {
    const std::int64_t full = layer.bounds(head) / layer.page_rows;
    const std::int64_t most = (span.read_pages.of(full) + 1) * layer.page_rows - 1;
    bounds[head] = std::min(layer.bounds(head), most);
  }
  layer.page_table = decltype(layer.page_table)(listed, call.kv_heads, place.width);
  layer.retained = decltype(layer.retained)(rows, call.kv_heads);
  layer.bounds = decltype(layer.bounds)(bounds, call.kv_heads);
  return choosing;
}

void DevicePageChoice::plan_calls(std::size_t calls) {
  m_planned.assign(calls, Planned());
  m_choosing.clear();
}

const std::vector<AttentionSpan>& DevicePageChoice::plan(std::size_t number,
                                                         const std::vector<AttentionSpan>& spans,
                                                         const AttentionCall& call) {
  // All calls of a step use the same scratch space, one after the other. Kernels keep its
  // addresses.
  const Sizes sizes = find_choosing(spans, call.kv_heads);
  if (m_places.empty()) return spans;
  if (sizes.pages > static_cast<std::int64_t>(m_scores.extent(0)) ||
      sizes.entries > static_cast<std::int64_t>(m_table.extent(0)) ||
      sizes.heads > static_cast<std::int64_t>(m_retained.extent(0))) {
    throw Error("attention: planned calls that read some pages need reserve() for their extents");
  }
  m_spans = spans;
  Planned& planned = m_planned[number];
  planned.first = m_choosing.size();
  planned.count = static_cast<int>(m_places.size());
  planned.call = call;
  planned.format = spans[m_places.front().span].cached.format;
  planned.page_rows = spans[m_places.front().span].cached.page_rows;
  for (const Place& place : m_places) {
    m_choosing.push_back(let_choose(place, call));
    planned.blocks = std::max(planned.blocks, blocks_of(place.full));
  }
  return m_spans;
}

// As SplitKV::pad_plans: launches have one shape for hundreds of steps.
void DevicePageChoice::pad_plans() {
  const auto suffices = [](std::int64_t padded, std::int64_t needed) {
    return padded >= needed && padded <= 2 * needed + 1;
  };
  bool last = m_padded.size() == m_planned.size();
  for (std::size_t i = 0; last && i < m_planned.size(); ++i) {
    last = suffices(m_padded[i], m_planned[i].blocks);
  }
  if (!last) m_padded.clear();
  for (std::size_t i = 0; i < m_planned.size(); ++i) {
    const std::int64_t blocks = m_planned[i].blocks;
    if (!last) m_padded.push_back(blocks > 0 ? blocks + blocks / 8 + 1 : 0);
    m_planned[i].blocks = m_padded[i];
  }
}

void DevicePageChoice::copy_plans(const ExecutionSpace& exec) {
  if (m_choosing.empty()) return;
  pad_plans();
  const auto count = static_cast<std::int64_t>(m_choosing.size());
  m_staged.reserve(count, "kvzap::attention::choosing");
  std::copy(m_choosing.begin(), m_choosing.end(), m_staged.host());
  m_staged.copy(exec, count);
}

void DevicePageChoice::run_planned(const ExecutionSpace& exec, std::size_t number) const {
  const Planned& planned = m_planned[number];
  if (planned.count == 0) return;
  const ChoosingSpans spans{m_staged.device().data() + planned.first, {}, planned.count};
  choose_pages(exec, spans, planned.blocks, planned.call, planned.format, planned.page_rows);
}

void DevicePageChoice::add_shape(std::vector<std::int64_t>& shape) const {
  for (const Planned& planned : m_planned) {
    shape.push_back(planned.count);
    shape.push_back(planned.blocks);
  }
}

DevicePageChoice::Sizes DevicePageChoice::sizes_of(const AttentionExtents& extents) {
  if (extents.chosen_page_rows == 0) return {};
  // Heads of a span have the width that the longest one needs.
  Sizes sizes;
  sizes.heads = extents.spans * extents.kv_heads;
  sizes.pages = sizes.heads * (extents.longest_single / extents.chosen_page_rows);
  sizes.entries = sizes.pages + sizes.heads;
  return sizes;
}

std::size_t DevicePageChoice::scratch_bytes(const AttentionExtents& extents) {
  const Sizes sizes = sizes_of(extents);
  return sizes.heads * 2 * sizeof(std::int64_t) + sizes.pages * sizeof(float) +
         sizes.entries * sizeof(PageId);
}

void DevicePageChoice::reserve(const AttentionExtents& extents) {
  const Sizes sizes = sizes_of(extents);
  if (sizes.heads == 0) return;
  m_spans.reserve(extents.spans);
  m_places.reserve(extents.spans);
  m_bounds.reserve(sizes.heads);
  reserve(sizes);
}

void DevicePageChoice::reserve(const Sizes& sizes) {
  base::reserve_scratch(m_scores, sizes.pages, "kvzap::attention::page_scores");
  base::reserve_scratch(m_table, sizes.entries, "kvzap::attention::page_choice");
  base::reserve_scratch(m_retained, sizes.heads, "kvzap::attention::chosen_rows");
}

}  // namespace kvzap::attention
