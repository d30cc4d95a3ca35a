// Judging, moving and compacting rows as Kokkos kernels, for devices.
#include "cache/cache_impl.hpp"

namespace kvzap::detail {
namespace {

/// The score of a row that leaves the ring, or passes by.
struct ExitScore {
  AppendStep step;
  const float* ring_scores;
  ScoresRef scores;
  KOKKOS_INLINE_FUNCTION float operator()(std::int64_t head, std::int64_t exit) const {
    return exit < step.in_ring ? ring_scores[head * step.window + step.slot(step.first + exit)]
                               : scores(head, exit - step.in_ring);
  }
};

}  // namespace

void judge(const ExecutionSpace& exec, const AppendStep& step, const float* ring_scores,
           const ScoresRef& scores, const EvictionRule& rule, const Kept& kept,
           const Counts& begins, const Counts& counts,
           const Kokkos::View<std::int64_t, MemorySpace>& non_finite) {
  const ExitScore score_of{step, ring_scores, scores};
  Kokkos::parallel_scan(
      "kvzap::append::judge", Range(exec, 0, step.heads * step.exits),
      KOKKOS_LAMBDA(std::int64_t i, std::int64_t & n, bool final) {
        const std::int64_t head = i / step.exits;
        const std::int64_t exit = i % step.exits;
        const bool keep = rule.keeps(score_of(head, exit), step.first + exit);
        if (final) {
          if (exit == 0) begins(head) = n;
          if (keep) kept(n) = static_cast<std::int32_t>(exit);
          if (exit == step.exits - 1) counts(head) = n + (keep ? 1 : 0);
        }
        if (keep) ++n;
      });
  Kokkos::parallel_for(
      "kvzap::append::judge_counts", Range(exec, 0, step.heads),
      KOKKOS_LAMBDA(std::int64_t head) { counts(head) -= begins(head); });
  const bool judges = rule.judge;
  Kokkos::parallel_reduce(
      "kvzap::append::count_non_finite", Range(exec, 0, judges ? step.heads * step.exits : 0),
      KOKKOS_LAMBDA(std::int64_t i, std::int64_t & sum) {
        if (!EvictionRule::is_finite(score_of(i / step.exits, i % step.exits))) ++sum;
      },
      non_finite);
}

template <class Value, PageOrder order>
void admit(const ExecutionSpace& exec, const AppendStep& step, std::int64_t most,
           const RingRef<Value>& ring, const RowsRef<Value>& keys, const RowsRef<Value>& values,
           const ScoresRef& scores, const Kept& kept, const Counts& begins, const Counts& counts,
           const Counts& old_retained, const PagePool::AddressView& addresses,
           const PagePool::AddressView& notes, const PageTable& table) {
  const Block<order> ring_block{step.window, step.dim};
  const Block<order> page_block{step.page_rows, step.dim};
  // One dimension of a row each, so that neighbours read and write neighbouring bytes.
  Kokkos::parallel_for(
      "kvzap::append::admit", Range(exec, 0, step.heads * most * step.dim),
      KOKKOS_LAMBDA(std::int64_t i) {
        const int d = static_cast<int>(i % step.dim);
        const std::int64_t head = i / step.dim / most;
        const std::int64_t n = i / step.dim % most;
        if (n >= counts(head)) return;
        const std::int64_t exit = kept(begins(head) + n);
        const bool from_ring = exit < step.in_ring;
        const std::int64_t ring_slot = step.slot(step.first + exit);
        const std::int64_t token = exit - step.in_ring;
        const std::int64_t row = old_retained(head) + n;
        const PageId page = table(head, row / step.page_rows);
        const std::int64_t slot = row % step.page_rows;
        Value* const target = reinterpret_cast<Value*>(addresses(page)) +
                              page_block.row_offset(slot) + d * page_block.dim_stride();
        if (d == 0) {
          page_positions(notes(page))[slot] = static_cast<std::int32_t>(step.first + exit);
          page_scores(notes(page), step.page_rows)[slot] =
              from_ring ? ring.scores[head * step.window + ring_slot] : scores(head, token);
        }
        if (from_ring) {
          const Value* const source = ring.rows + 2 * head * step.window * step.dim +
                                      ring_block.row_offset(ring_slot) +
                                      d * ring_block.dim_stride();
          target[0] = source[0];
          target[page_block.values_offset()] = source[ring_block.values_offset()];
        } else {
          target[0] = keys.at(token, head)[d * keys.dim_stride];
          target[page_block.values_offset()] = values.at(token, head)[d * values.dim_stride];
        }
      });
}

// One dimension each.
template <class Value, PageOrder order>
void save(const ExecutionSpace& exec, const AppendStep& step, const RingRef<Value>& ring,
          const SavedRows<Value>& saved, bool back) {
  const Block<order> block{step.window, step.dim};
  Kokkos::parallel_for(
      "kvzap::append::save", Range(exec, 0, step.heads * saved.count * step.dim),
      KOKKOS_LAMBDA(std::int64_t i) {
        const int d = static_cast<int>(i % step.dim);
        const std::int64_t head = i / step.dim / saved.count;
        const std::int64_t n = i / step.dim % saved.count;
        const std::int64_t slot = step.slot(step.first + n);
        Value* const row = ring.rows + 2 * head * step.window * step.dim + block.row_offset(slot) +
                           d * block.dim_stride();
        Value* const copy = saved.rows + 2 * (head * saved.head_rows + n) * step.dim + d;
        float* const score = ring.scores + head * step.window + slot;
        float* const score_copy = saved.scores + head * saved.head_rows + n;
        if (back) {
          row[0] = copy[0];
          row[block.values_offset()] = copy[step.dim];
          if (d == 0) *score = *score_copy;
        } else {
          copy[0] = row[0];
          copy[step.dim] = row[block.values_offset()];
          if (d == 0) *score_copy = *score;
        }
      });
}

template <class Value, PageOrder order>
void fill_ring(const ExecutionSpace& exec, const AppendStep& step, const RingRef<Value>& ring,
               const RowsRef<Value>& keys, const RowsRef<Value>& values, const ScoresRef& scores) {
  const Block<order> block{step.window, step.dim};
  const std::int64_t entering = std::min<std::int64_t>(step.count, step.window);
  Kokkos::parallel_for(
      "kvzap::append::ring", Range(exec, 0, step.heads * entering * step.dim),
      KOKKOS_LAMBDA(std::int64_t i) {
        const int d = static_cast<int>(i % step.dim);
        const std::int64_t head = i / step.dim / entering;
        const std::int64_t token = step.count - entering + i / step.dim % entering;
        const std::int64_t slot = step.slot(step.old_tokens + token);
        Value* const target = ring.rows + 2 * head * step.window * step.dim +
                              block.row_offset(slot) + d * block.dim_stride();
        target[0] = keys.at(token, head)[d * keys.dim_stride];
        target[block.values_offset()] = values.at(token, head)[d * values.dim_stride];
        if (d == 0) ring.scores[head * step.window + slot] = scores(head, token);
      });
}

void select_flagged(const ExecutionSpace& exec, int heads, std::int64_t extent,
                    const Counts& retained, const FlagsView& keep, const Kept& kept,
                    const Counts& begins, const Counts& counts, const Counts& firsts) {
  Kokkos::parallel_scan(
      "kvzap::compact::select", Range(exec, 0, heads * extent),
      KOKKOS_LAMBDA(std::int64_t i, std::int64_t & n, bool final) {
        const std::int64_t head = i / extent;
        const std::int64_t row = i % extent;
        const bool keeps = row < retained(head) && keep(head, row) != 0;
        if (final) {
          if (row == 0) begins(head) = n;
          if (keeps) kept(n) = static_cast<std::int32_t>(row);
          if (row == extent - 1) counts(head) = n + (keeps ? 1 : 0);
        }
        if (keeps) ++n;
      });
  Kokkos::parallel_for(
      "kvzap::compact::counts", Range(exec, 0, heads), KOKKOS_LAMBDA(std::int64_t head) {
        counts(head) -= begins(head);
        firsts(head) = retained(head);
      });
  Kokkos::parallel_for(
      "kvzap::compact::first", Range(exec, 0, heads * extent), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t head = i / extent;
        const std::int64_t row = i % extent;
        if (row < retained(head) && keep(head, row) == 0) {
          Kokkos::atomic_fetch_min(&firsts(head), row);
        }
      });
}

template <class Value, PageOrder order>
void compact_columns(const ExecutionSpace& exec, int heads, int page_rows, int dim,
                     const Kept& kept, const Counts& begins, const Counts& counts,
                     const PagePool::AddressView& addresses, const PagePool::AddressView& notes,
                     const PageTable& from, const PageTable& to) {
  const Block<order> block{page_rows, dim};
  const std::int64_t columns = 2 * std::int64_t{dim} + 2;
  Kokkos::parallel_for(
      "kvzap::compact::columns", Range(exec, 0, heads * columns), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t head = i / columns;
        const std::int64_t column = i % columns;
        const std::int64_t offset =
            column < dim ? column * block.dim_stride()
                         : block.values_offset() + (column - dim) * block.dim_stride();
        for (std::int64_t n = 0; n < counts(head); ++n) {
          const std::int64_t row = kept(begins(head) + n);
          if (row == n) continue;
          const PageId source = from(head, row / page_rows);
          const PageId target = to(head, n / page_rows);
          const std::int64_t old_slot = row % page_rows;
          const std::int64_t slot = n % page_rows;
          if (column == columns - 2) {
            page_positions(notes(target))[slot] = page_positions(notes(source))[old_slot];
          } else if (column == columns - 1) {
            page_scores(notes(target), page_rows)[slot] =
                page_scores(notes(source), page_rows)[old_slot];
          } else {
            reinterpret_cast<Value*>(addresses(target))[block.row_offset(slot) + offset] =
                reinterpret_cast<const Value*>(
                    addresses(source))[block.row_offset(old_slot) + offset];
          }
        }
      });
}

#define KVZAP_INSTANTIATE(Value, order)                                                           \
  template void admit<Value, order>(                                                              \
      const ExecutionSpace&, const AppendStep&, std::int64_t, const RingRef<Value>&,              \
      const RowsRef<Value>&, const RowsRef<Value>&, const ScoresRef&, const Kept&, const Counts&, \
      const Counts&, const Counts&, const PagePool::AddressView&, const PagePool::AddressView&,   \
      const PageTable&);                                                                          \
  template void save<Value, order>(const ExecutionSpace&, const AppendStep&,                      \
                                   const RingRef<Value>&, const SavedRows<Value>&, bool);         \
  template void fill_ring<Value, order>(const ExecutionSpace&, const AppendStep&,                 \
                                        const RingRef<Value>&, const RowsRef<Value>&,             \
                                        const RowsRef<Value>&, const ScoresRef&);                 \
  template void compact_columns<Value, order>(                                                    \
      const ExecutionSpace&, int, int, int, const Kept&, const Counts&, const Counts&,            \
      const PagePool::AddressView&, const PagePool::AddressView&, const PageTable&,               \
      const PageTable&);
KVZAP_FOR_EACH_CACHE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap::detail
