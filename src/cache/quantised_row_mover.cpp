// The row mover of pages with quantised rows: rows that leave the ring are quantised once, and
// quantised rows move as they lie.
#include <algorithm>
#include <cstring>
#include <deque>
#include <iterator>

#include "base/host_threads.hpp"
#include "cache/quantised_place.hpp"
#include "cache/row_mover.hpp"
#include "linalg/device/lane_rows.hpp"
#include "linalg/host/rotated_rows.hpp"
#include "linalg/host/row_kernels.hpp"

namespace kvzap::cache {
namespace {

/// Rows that leave a ring, or never enter it, and the pages that take them.
template <class Value>
struct LeavingRows {
  TypedSpan<Value> span;
  QuantisedPage page;

  /// The key or value of one leaving row.
  struct Source {
    const Value* data;
    std::int64_t stride;
    KOKKOS_INLINE_FUNCTION float operator()(int d) const {
      return static_cast<float>(data[d * stride]);
    }
  };
  KOKKOS_INLINE_FUNCTION Source source(std::int64_t head, std::int64_t n, bool values) const {
    const auto row = span.leaving_row(head, n);
    return values ? Source{row.value, row.value_stride} : Source{row.key, row.key_stride};
  }
};

// Threads and lanes of a team on a device.
constexpr base::TeamShape pack_shape{4, 32};

/// A thread of a team packs a key or a value.
template <class Value>
struct PackRows {
  LeavingRows<Value> rows;
  std::int64_t most;
  KeptPart kept;
  const std::int64_t* retained;
  PagesRef pages;
  std::int32_t scratch_bytes;

  KOKKOS_FUNCTION void operator()(const base::TeamMember& team) const {
    auto* const scratch =
        static_cast<float*>(team.team_scratch(0).get_shmem_aligned(scratch_bytes, 16));
    const int threads = team.team_size();
    Kokkos::parallel_for(Kokkos::TeamThreadRange(team, threads), [&](int t) {
      const std::int64_t i = std::int64_t{team.league_rank()} * threads + t;
      const int vectors = rows.page.format.vectors();
      const bool values = i % vectors != 0;
      const std::int64_t head = i / vectors / most;
      const std::int64_t n = i / vectors % most;
      if (head >= rows.span.step.heads || n >= kept.counts[head]) return;
      const std::int64_t leaving_row = kept.rows[kept.begins[head] + n];
      const std::int64_t row = retained[head] + n;
      const std::int64_t slot = row % rows.page.rows;
      const PageId page = pages.id(head, row / rows.page.rows);
      const QuantisedPlace place(rows.page, pages.addresses[page], slot, values);
      linalg::pack_row(linalg::LaneLoops{team},
                       values ? rows.page.format.values : rows.page.format.keys,
                       rows.source(head, leaving_row, values), rows.page.dim,
                       scratch + t * rows.page.dim, place.codes, place.scale);
      if (values) return;
      Kokkos::single(Kokkos::PerThread(team), [&] {
        rows.span.write_metadata(pages.metadata[page], slot, head, leaving_row);
      });
    });
  }
};

template <class Value>
void admit_by_kernel(const ExecutionSpace& exec, const LeavingRows<Value>& rows, std::int64_t most,
                     const KeptPart& kept, const std::int64_t* retained, const PagesRef& pages) {
  PackRows<Value> kernel{rows, most, kept, retained, pages, 0};
  const auto bytes = [&](int threads) { return sizeof(float) * threads * rows.page.dim; };
  const auto policy_of = [&](std::int64_t teams) {
    return base::team_policy<base::SmallTeamPolicy>(exec, teams, pack_shape, kernel, bytes);
  };
  const int threads = policy_of(1).team_size();
  kernel.scratch_bytes = static_cast<std::int32_t>(bytes(threads));
  const std::int64_t packed = rows.page.format.vectors() * rows.span.step.heads * most;
  const std::int64_t teams = (packed + threads - 1) / threads;
  Kokkos::parallel_for("kvzap::append::pack", policy_of(teams), kernel);
}

/// One thread for each byte of a head's codes, scales and metadata, in ascending order of rows, so
/// that nothing is overwritten before it has been read.
void compact_by_kernel(const ExecutionSpace& exec, const QuantisedPage& page, const KeptPart& kept,
                       const PagesRef& from, const PagesRef& to) {
  const std::int64_t key_bytes = QuantisedRows::code_bytes(page.format.keys, page.dim);
  const bool has_values = !page.format.values_are_keys;
  const std::int64_t value_bytes =
      has_values ? QuantisedRows::code_bytes(page.format.values, page.dim) : std::int64_t{0};
  // Codes and scale of each vector, position and score.
  const std::int64_t columns = key_bytes + value_bytes + page.format.vectors() + 2;
  Kokkos::parallel_for(
      "kvzap::compact::packed_columns", Range(exec, 0, kept.heads * columns),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t head = i / columns;
        const std::int64_t column = i % columns;
        for (std::int64_t n = 0; n < kept.counts[head]; ++n) {
          const std::int64_t row = kept.rows[kept.begins[head] + n];
          if (row == n) continue;
          const PageId source = from.id(head, row / page.rows);
          const PageId target = to.id(head, n / page.rows);
          const std::int64_t old_slot = row % page.rows;
          const std::int64_t slot = n % page.rows;
          if (column == columns - 2) {
            page_positions(to.metadata[target])[slot] =
                page_positions(from.metadata[source])[old_slot];
          } else if (column == columns - 1) {
            page_scores(to.metadata[target], page.rows)[slot] =
                page_scores(from.metadata[source], page.rows)[old_slot];
          } else {
            const bool is_scale = column >= key_bytes + value_bytes;
            const bool values =
                has_values && (is_scale ? column == columns - 3 : column >= key_bytes);
            const QuantisedPlace old(page, from.addresses[source], old_slot, values);
            const QuantisedPlace now(page, to.addresses[target], slot, values);
            if (is_scale) {
              *now.scale = *old.scale;
            } else {
              const std::int64_t byte = values ? column - key_bytes : column;
              now.codes[byte] = old.codes[byte];
            }
          }
        }
      });
}

template <class Value>
class QuantisedRowMover : public RowMover {
 public:
  QuantisedRowMover(const RowMover& wide, const PageFormat& format)
      : m_wide(wide), m_format(format) {}

  bool runs_kernels() const override { return m_wide.runs_kernels(); }
  void judge(const ExecutionSpace& exec, const SpanRows& span, const EvictionRule& rule,
             const KeptPart& kept) const override {
    m_wide.judge(exec, span, rule, kept);
  }
  void select(const ExecutionSpace& exec, const FlagsView& keep, const HeadCounts& rows,
              const KeptPart& kept) const override {
    m_wide.select(exec, keep, rows, kept);
  }
  void count_non_finite(const ExecutionSpace& exec, const ScoresRef& scores,
                        const KeptPart& kept) const override {
    m_wide.count_non_finite(exec, scores, kept);
  }
  void save(const ExecutionSpace& exec, const SpanRows& span, const SavedRows& saved,
            bool back) const override {
    m_wide.save(exec, span, saved, back);
  }
  void fill_ring(const ExecutionSpace& exec, const SpanRows& span) const override {
    m_wide.fill_ring(exec, span);
  }

  void admit(const ExecutionSpace& exec, const SpanRows& span, const KeptPart& kept,
             const HeadCounts& retained, const PagesRef& pages) const override {
    const LeavingRows<Value> rows{TypedSpan<Value>::of(span),
                                  {m_format, span.step.page_rows, span.step.dim}};
    std::int64_t most = 0;
    for (int h = 0; h < kept.heads; ++h) most = std::max(most, kept.host_counts[h]);
    if (most == 0) return;
    if (runs_kernels()) {
      return admit_by_kernel(exec, rows, most, kept, retained.device, pages);
    }
    if constexpr (base::runs_on_host) admit_on_host(rows, most, kept, retained, pages);
  }

  void compact(const ExecutionSpace& exec, const Block& block, const KeptPart& kept,
               const PagesRef& from, const PagesRef& to) const override {
    const QuantisedPage page{m_format, block.capacity, block.dim};
    if (kept.extent == 0) return;
    if (runs_kernels()) return compact_by_kernel(exec, page, kept, from, to);
    if constexpr (base::runs_on_host) {
      base::host_for("kvzap::compact::quantised", kept.heads, [&](std::int64_t h) {
        compact_head(page, static_cast<int>(h), kept, from, to);
      });
    }
  }

 private:
  void admit_on_host(const LeavingRows<Value>& rows, std::int64_t most, const KeptPart& kept,
                     const HeadCounts& retained, const PagesRef& pages) const {
    const QuantisedPage& page = rows.page;
    const int dim = page.dim;
    constexpr std::int64_t piece = 32;  // rows
    constexpr std::int64_t work_of_element = 32;
    const std::int64_t pieces = (most + piece - 1) / piece;
    base::host_for("kvzap::append::pack", kept.heads * pieces,
                   std::min(most, piece) * dim * work_of_element, [&](std::int64_t i) {
                     const auto head = static_cast<int>(i % kept.heads);
                     const std::int64_t begin = i / kept.heads * piece;
                     const std::int64_t end = std::min(begin + piece, kept.host_counts[head]);
                     linalg::RowBuffer buffer(dim);
                     float* const row = buffer.data();
                     for (std::int64_t n = begin; n < end; ++n) {
                       const std::int64_t leaving_row = kept.rows[head * kept.extent + n];
                       const std::int64_t target = retained.host[head] + n;
                       const std::int64_t slot = target % page.rows;
                       const PageAddress address = pages.at(head, target / page.rows);
                       for (int v = 0; v < m_format.vectors(); ++v) {
                         const bool values = v == 1;
                         const auto source = rows.source(head, leaving_row, values);
                         if (source.stride == 1) {
                           linalg::widen(source.data, row, dim);
                         } else {
                           for (int d = 0; d < dim; ++d) row[d] = source(d);
                         }
                         const QuantisedPlace place(page, address.rows, slot, values);
                         linalg::pack_row(values ? m_format.values : m_format.keys, row, dim,
                                          place.codes, place.scale);
                       }
                       rows.span.write_metadata(address.metadata, slot, head, leaving_row);
                     }
                   });
  }

  static void compact_head(const QuantisedPage& page, int head, const KeptPart& kept,
                           const PagesRef& from, const PagesRef& to) {
    const std::int32_t* const listed = kept.rows + head * kept.extent;
    for (std::int64_t n = kept.host_firsts[head]; n < kept.host_counts[head]; ++n) {
      const std::int64_t old_slot = listed[n] % page.rows;
      const std::int64_t slot = n % page.rows;
      const PageAddress source = from.at(head, listed[n] / page.rows);
      const PageAddress target = to.at(head, n / page.rows);
      for (int v = 0; v < page.format.vectors(); ++v) {
        const bool values = v == 1;
        const QuantisedPlace old(page, source.rows, old_slot, values);
        const QuantisedPlace now(page, target.rows, slot, values);
        const RowType type = values ? page.format.values : page.format.keys;
        std::memmove(now.codes, old.codes, QuantisedRows::code_bytes(type, page.dim));
        *now.scale = *old.scale;
      }
      page_positions(target.metadata)[slot] = page_positions(source.metadata)[old_slot];
      page_scores(target.metadata, page.rows)[slot] =
          page_scores(source.metadata, page.rows)[old_slot];
    }
  }

  const RowMover& m_wide;
  PageFormat m_format;
};

template <class Value>
const RowMover& mover_of(const PageFormat& format) {
  constexpr int types = static_cast<int>(std::size(quantised_types));
  static const std::deque<QuantisedRowMover<Value>> movers = [] {
    std::deque<QuantisedRowMover<Value>> all;
    for (const bool by_kernels : {!base::runs_on_host, true}) {
      constexpr DType dtype = DTypeOf<Value>::value;
      const RowMover& wide = by_kernels ? kernel_row_mover(dtype) : host_row_mover(dtype);
      for (const bool are_keys : {false, true}) {
        for (const RowType keys : quantised_types) {
          for (const RowType values : quantised_types) {
            all.emplace_back(wide, PageFormat{keys, values, are_keys});
          }
        }
      }
    }
    return all;
  }();
  const auto number = [](RowType type) {
    return static_cast<int>(
        std::find(std::begin(quantised_types), std::end(quantised_types), type) -
        std::begin(quantised_types));
  };
  const int pass = (use_portable_path() ? 2 : 0) + (format.values_are_keys ? 1 : 0);
  return movers[(pass * types + number(format.keys)) * types + number(format.values)];
}

}  // namespace

const RowMover& quantised_row_mover(DType dtype, const PageFormat& format) {
  return with_value_type(
      dtype, [&](auto zero) -> const RowMover& { return mover_of<decltype(zero)>(format); });
}

}  // namespace kvzap::cache
