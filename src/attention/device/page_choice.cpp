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

/// Writes the largest score that a key of each full page can have with a query of the group. A team
/// takes some pages of a head. Bounds of quantised keys are rotated, and so are the queries then.
template <class Bound>
struct ScorePages {
  RaggedLayer layer;
  const float* queries;  // of the span's token
  std::int64_t head_stride, dim_stride;
  float* scores;  // (head, full)
  std::int32_t full, group, scratch_bytes;

  KOKKOS_FUNCTION void operator()(const base::TeamMember& team) const {
    const int blocks = (full + pages_at_once - 1) / pages_at_once;
    const int head = team.league_rank() / blocks;
    const int dim = layer.head_dim;
    const int begin = team.league_rank() % blocks * pages_at_once;
    const auto own = static_cast<int>(layer.retained(head) / layer.page_rows);
    const int end = begin + pages_at_once < own ? begin + pages_at_once : own;
    if (begin >= end) return;
    float* const query =
        static_cast<float*>(team.team_scratch(0).get_shmem_aligned(scratch_bytes, 16));
    for (int g = 0; g < group; ++g) {
      const float* const source = queries + (std::int64_t{head} * group + g) * head_stride;
      Kokkos::parallel_for(Kokkos::TeamThreadRange(team, 1), [&](int) {
        const linalg::LaneLoops loops{team};
        loops.each(dim, [&](int d) { query[d] = source[d * dim_stride]; });
        if (layer.format.quantised()) linalg::rotate_row(loops, query, dim);
      });
      team.team_barrier();
      Kokkos::parallel_for(Kokkos::TeamThreadRange(team, begin, end), [&](int page) {
        const Bound* const bounds = layer.template page_bounds<Bound>(head, page);
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
          float& score = scores[std::int64_t{head} * full + page];
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
/// head, in time proportional to its pages.
struct ListPages {
  static constexpr int bins = 256;  // of eight bits of a key
  static constexpr int scratch_bytes = (bins + 2) * static_cast<int>(sizeof(int));

  RaggedLayer layer;
  ReadPages read;
  const float* scores;     // (head, full)
  PageId* table;           // (head, width)
  std::int64_t* retained;  // (head)
  std::int32_t full, width;

  KOKKOS_FUNCTION void operator()(const base::TeamMember& team) const {
    const int head = team.league_rank();
    const std::int64_t rows = layer.retained(head);
    const auto own = static_cast<int>(rows / layer.page_rows);
    const auto count = static_cast<int>(read.of(own));
    const float* const of_head = scores + std::int64_t{head} * full;
    PageId* const listed = table + std::int64_t{head} * width;
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
            listed[place] = layer.page_table(head, page);
          }
          before += key > last ? std::int64_t{1} << 32 : key == last ? 1 : 0;
        });
    Kokkos::single(Kokkos::PerTeam(team), [&] {
      const std::int64_t rest = rows % layer.page_rows;
      if (rest > 0) listed[count] = layer.page_table(head, own);
      retained[head] = std::int64_t{count} * layer.page_rows + rest;
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

}  // namespace

const std::vector<AttentionSpan>& DevicePageChoice::operator()(
    const ExecutionSpace& exec, const std::vector<AttentionSpan>& spans,
    const AttentionCall& call) {
  m_places.clear();
  Sizes sizes;
  for (std::size_t s = 0; s < spans.size(); ++s) {
    const AttentionSpan& span = spans[s];
    if (!span.cached.has_bounds || span.queries != 1) continue;
    Place place{static_cast<int>(s), 0, 0, sizes};
    bool chooses = false;
    for (int head = 0; head < call.kv_heads; ++head) {
      const std::int64_t full = span.cached.bounds(head) / span.cached.page_rows;
      const std::int64_t read = span.read_pages.of(full);
      chooses = chooses || read < full;
      place.full = std::max(place.full, full);
      place.width = std::max(place.width, read + 1);
    }
    if (!chooses) continue;
    sizes.pages += call.kv_heads * place.full;
    sizes.entries += call.kv_heads * place.width;
    sizes.heads += call.kv_heads;
    m_places.push_back(place);
  }
  if (m_places.empty()) return spans;
  reserve(sizes);
  m_spans = spans;
  m_bounds.resize(sizes.heads);
  for (const Place& place : m_places) choose(exec, place, call);
  return m_spans;
}

void DevicePageChoice::choose(const ExecutionSpace& exec, const Place& place,
                              const AttentionCall& call) {
  AttentionSpan& span = m_spans[place.span];
  CachedLayer& layer = span.cached;
  float* const scores = m_scores.data() + place.first.pages;
  const auto with_bounds = [&](auto zero) {
    ScorePages<decltype(zero)> kernel{
        layer,  // NOLINT(cppcoreguidelines-slicing)
        call.queries.data() + span.first_query * call.queries.stride(0),
        static_cast<std::int64_t>(call.queries.stride(1)),
        static_cast<std::int64_t>(call.queries.stride(2)),
        scores,
        static_cast<std::int32_t>(place.full),
        call.group,
        static_cast<std::int32_t>(call.dim * sizeof(float))};
    static_assert(sizeof(kernel) <= base::most_arguments, "Kokkos would wait");
    const std::int64_t blocks = (place.full + pages_at_once - 1) / pages_at_once;
    base::parallel_for("kvzap::attention::score_pages",
                       base::team_policy(exec, call.kv_heads * blocks, score_shape, kernel,
                                         [&](int) { return call.dim * sizeof(float); }),
                       kernel);
  };
  if (layer.format.quantised()) {
    with_bounds(bfloat16());
  } else {
    with_value_type(call.dtype(), with_bounds);
  }
  PageId* const table = m_table.data() + place.first.entries;
  std::int64_t* const retained = m_retained.data() + place.first.heads;
  const ListPages list{layer,  // NOLINT(cppcoreguidelines-slicing)
                       span.read_pages,
                       scores,
                       table,
                       retained,
                       static_cast<std::int32_t>(place.full),
                       static_cast<std::int32_t>(place.width)};
  static_assert(sizeof(list) <= base::most_arguments, "Kokkos would wait");
  base::parallel_for(
      "kvzap::attention::list_pages",
      base::team_policy(exec, call.kv_heads, order_shape, list,
                        [](int) { return static_cast<std::size_t>(ListPages::scratch_bytes); }),
      list);
  std::int64_t* const bounds = m_bounds.data() + place.first.heads;
  for (int head = 0; head < call.kv_heads; ++head) {
    const std::int64_t full = layer.bounds(head) / layer.page_rows;
    const std::int64_t most = (span.read_pages.of(full) + 1) * layer.page_rows - 1;
    bounds[head] = std::min(layer.bounds(head), most);
  }
  layer.page_table = decltype(layer.page_table)(table, call.kv_heads, place.width);
  layer.retained = decltype(layer.retained)(retained, call.kv_heads);
  layer.bounds = decltype(layer.bounds)(bounds, call.kv_heads);
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
