// The row mover of kernels, for devices and (in tests) for hosts.
#include <algorithm>

#include "cache/row_mover.hpp"

namespace kvzap::cache {
namespace {

using Total = Kokkos::View<std::int64_t, MemorySpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;

/// The score of a row that leaves the ring or never enters it.
struct LeavingScore {
  AppendStep step;
  const float* ring_scores;
  ScoresRef scores;
  KOKKOS_INLINE_FUNCTION float operator()(std::int64_t head, std::int64_t leaving_row) const {
    return leaving_row < step.in_ring
               ? ring_scores[head * step.window + step.slot(step.first + leaving_row)]
               : scores(head, leaving_row - step.in_ring);
  }
};

// Kernels are in functions of this namespace: device compilers reject them in private classes.

void clear_counts(const ExecutionSpace& exec, const KeptPart& kept) {
  Kokkos::parallel_for(
      "kvzap::cache::clear_counts", Range(exec, 0, std::max(kept.heads, 1)),
      KOKKOS_LAMBDA(std::int64_t head) {
        if (head < kept.heads) kept.counts[head] = kept.firsts[head] = 0;
        if (head == 0) *kept.non_finite = 0;
      });
}

void judge_leaving(const ExecutionSpace& exec, const AppendStep& step, const LeavingScore& score_of,
                   const EvictionRule& rule, const KeptPart& kept) {
  Kokkos::parallel_scan(
      "kvzap::append::judge", Range(exec, 0, step.heads * step.leaving),
      KOKKOS_LAMBDA(std::int64_t i, std::int64_t & n, bool final) {
        const std::int64_t head = i / step.leaving;
        const std::int64_t leaving_row = i % step.leaving;
        const bool keep = rule.keeps(score_of(head, leaving_row), step.first + leaving_row);
        if (final) {
          if (leaving_row == 0) kept.begins[head] = n;
          if (keep) kept.rows[n] = static_cast<std::int32_t>(leaving_row);
          if (leaving_row == step.leaving - 1) kept.counts[head] = n + (keep ? 1 : 0);
        }
        if (keep) ++n;
      });
  Kokkos::parallel_for(
      "kvzap::append::judge_counts", Range(exec, 0, step.heads),
      KOKKOS_LAMBDA(std::int64_t head) { kept.counts[head] -= kept.begins[head]; });
  const bool judges = rule.judges();
  Kokkos::parallel_reduce(
      "kvzap::append::count_non_finite", Range(exec, 0, judges ? step.heads * step.leaving : 0),
      KOKKOS_LAMBDA(std::int64_t i, std::int64_t & sum) {
        if (!EvictionRule::is_finite(score_of(i / step.leaving, i % step.leaving))) ++sum;
      },
      Total(kept.non_finite));
}

void select_flagged(const ExecutionSpace& exec, const FlagsView& keep, const std::int64_t* rows,
                    const KeptPart& kept) {
  const std::int64_t extent = kept.extent;
  Kokkos::parallel_scan(
      "kvzap::cache::select", Range(exec, 0, kept.heads * extent),
      KOKKOS_LAMBDA(std::int64_t i, std::int64_t & n, bool final) {
        const std::int64_t head = i / extent;
        const std::int64_t row = i % extent;
        const bool keeps = (!rows || row < rows[head]) && keep(head, row) != 0;
        if (final) {
          if (row == 0) kept.begins[head] = n;
          if (keeps) kept.rows[n] = static_cast<std::int32_t>(row);
          if (row == extent - 1) kept.counts[head] = n + (keeps ? 1 : 0);
        }
        if (keeps) ++n;
      });
  Kokkos::parallel_for(
      "kvzap::cache::select_counts", Range(exec, 0, kept.heads), KOKKOS_LAMBDA(std::int64_t head) {
        kept.counts[head] -= kept.begins[head];
        kept.firsts[head] = rows ? rows[head] : extent;
      });
  Kokkos::parallel_for(
      "kvzap::cache::select_firsts", Range(exec, 0, kept.heads * extent),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t head = i / extent;
        const std::int64_t row = i % extent;
        if ((!rows || row < rows[head]) && keep(head, row) == 0) {
          Kokkos::atomic_fetch_min(&kept.firsts[head], row);
        }
      });
}

void count_listed(const ExecutionSpace& exec, const ScoresRef& scores, const KeptPart& kept) {
  const std::int64_t extent = kept.extent;
  Kokkos::parallel_reduce(
      "kvzap::cache::count_non_finite", Range(exec, 0, scores.data ? kept.heads * extent : 0),
      KOKKOS_LAMBDA(std::int64_t i, std::int64_t & sum) {
        const std::int64_t head = i / extent;
        const std::int64_t n = i % extent;
        if (n >= kept.counts[head]) return;
        if (!EvictionRule::is_finite(scores(head, kept.rows[kept.begins[head] + n]))) ++sum;
      },
      Total(kept.non_finite));
}

/// `most`: largest number of listed rows of any head.
template <class Value>
void admit_listed(const ExecutionSpace& exec, const TypedSpan<Value>& span, std::int64_t most,
                  const KeptPart& kept, const std::int64_t* retained, const PagesRef& pages) {
  const AppendStep step = span.step;
  const Block page_block = step.page();
  // One thread per dimension of a row: neighbouring threads read and write neighbouring bytes.
  Kokkos::parallel_for(
      "kvzap::append::admit", Range(exec, 0, step.heads * most * step.dim),
      KOKKOS_LAMBDA(std::int64_t i) {
        const int d = static_cast<int>(i % step.dim);
        const std::int64_t head = i / step.dim / most;
        const std::int64_t n = i / step.dim % most;
        if (n >= kept.counts[head]) return;
        const std::int64_t leaving_row = kept.rows[kept.begins[head] + n];
        const std::int64_t row = retained[head] + n;
        const PageId page = pages.id(head, row / step.page_rows);
        const std::int64_t slot = row % step.page_rows;
        if (d == 0) span.write_metadata(pages.metadata[page], slot, head, leaving_row);
        const auto source = span.leaving_row(head, leaving_row);
        Value* const target =
            reinterpret_cast<Value*>(pages.addresses[page]) + page_block.row_offset(slot) + d;
        target[0] = source.key[d * source.key_stride];
        if (step.vectors == 2) {
          target[page_block.values_offset()] = source.value[d * source.value_stride];
        }
      });
}

/// One thread per dimension of a row.
template <class Value>
void save_leaving(const ExecutionSpace& exec, const AppendStep& step, const RingRef<Value>& ring,
                  const SavedRows& saved, bool back) {
  auto* const copies = static_cast<Value*>(saved.rows);
  const Block block = step.ring();
  Kokkos::parallel_for(
      "kvzap::append::save", Range(exec, 0, step.heads * saved.count * step.dim),
      KOKKOS_LAMBDA(std::int64_t i) {
        const int d = static_cast<int>(i % step.dim);
        const std::int64_t head = i / step.dim / saved.count;
        const std::int64_t n = i / step.dim % saved.count;
        const std::int64_t slot = step.slot(step.first + n);
        Value* const row = ring.rows + head * block.size() + block.row_offset(slot) + d;
        Value* const copy = copies + step.vectors * (head * saved.head_rows + n) * step.dim + d;
        float* const score = ring.scores + head * step.window + slot;
        float* const score_copy = saved.scores + head * saved.head_rows + n;
        for (int v = 0; v < step.vectors; ++v) {
          Value& own = row[v * block.values_offset()];
          Value& own_copy = copy[v * step.dim];
          (back ? own : own_copy) = back ? own_copy : own;
        }
        if (d == 0) (back ? *score : *score_copy) = back ? *score_copy : *score;
      });
}

template <class Value>
void write_ring(const ExecutionSpace& exec, const TypedSpan<Value>& span) {
  const AppendStep step = span.step;
  const Block block = step.ring();
  const std::int64_t entering = std::min<std::int64_t>(step.count, step.window);
  Kokkos::parallel_for(
      "kvzap::append::ring", Range(exec, 0, step.heads * entering * step.dim),
      KOKKOS_LAMBDA(std::int64_t i) {
        const int d = static_cast<int>(i % step.dim);
        const std::int64_t head = i / step.dim / entering;
        const std::int64_t token = step.count - entering + i / step.dim % entering;
        const std::int64_t slot = step.slot(step.old_tokens + token);
        Value* const target = span.ring.rows + head * block.size() + block.row_offset(slot) + d;
        target[0] = span.keys.at(token, head)[d * span.keys.dim_stride];
        if (step.vectors == 2) {
          target[block.values_offset()] = span.values.at(token, head)[d * span.values.dim_stride];
        }
        if (d == 0) span.ring.scores[head * step.window + slot] = span.scores(head, token);
      });
}

/// One thread per dimension of a head, in ascending order of rows, so that no element is
/// overwritten before it has been read.
template <class Value>
void compact_columns(const ExecutionSpace& exec, const Block& block, const KeptPart& kept,
                     const PagesRef& from, const PagesRef& to) {
  const int page_rows = block.capacity;
  const int dim = block.dim;
  const std::int64_t columns = std::int64_t{block.vectors} * dim + 2;
  Kokkos::parallel_for(
      "kvzap::compact::columns", Range(exec, 0, kept.heads * columns),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t head = i / columns;
        const std::int64_t column = i % columns;
        const std::int64_t offset = column < dim ? column : block.values_offset() + column - dim;
        for (std::int64_t n = 0; n < kept.counts[head]; ++n) {
          const std::int64_t row = kept.rows[kept.begins[head] + n];
          if (row == n) continue;
          const PageId source = from.id(head, row / page_rows);
          const PageId target = to.id(head, n / page_rows);
          const std::int64_t old_slot = row % page_rows;
          const std::int64_t slot = n % page_rows;
          if (column == columns - 2) {
            page_positions(to.metadata[target])[slot] =
                page_positions(from.metadata[source])[old_slot];
          } else if (column == columns - 1) {
            page_scores(to.metadata[target], page_rows)[slot] =
                page_scores(from.metadata[source], page_rows)[old_slot];
          } else {
            reinterpret_cast<Value*>(to.addresses[target])[block.row_offset(slot) + offset] =
                reinterpret_cast<const Value*>(
                    from.addresses[source])[block.row_offset(old_slot) + offset];
          }
        }
      });
}

template <class Value>
class KernelRowMover : public RowMover {
 public:
  bool runs_kernels() const override { return true; }

  void judge(const ExecutionSpace& exec, const SpanRows& span, const EvictionRule& rule,
             const KeptPart& kept) const override {
    if (span.step.leaving == 0) {
      clear_counts(exec, kept);
    } else {
      judge_leaving(exec, span.step, {span.step, span.ring.scores, span.scores}, rule, kept);
    }
  }

  void select(const ExecutionSpace& exec, const FlagsView& keep, const HeadCounts& rows,
              const KeptPart& kept) const override {
    if (kept.extent == 0) {
      clear_counts(exec, kept);
    } else {
      select_flagged(exec, keep, rows.device, kept);
    }
  }

  void count_non_finite(const ExecutionSpace& exec, const ScoresRef& scores,
                        const KeptPart& kept) const override {
    count_listed(exec, scores, kept);
  }

  void admit(const ExecutionSpace& exec, const SpanRows& span, const KeptPart& kept,
             const HeadCounts& retained, const PagesRef& pages) const override {
    std::int64_t most = 0;
    for (int h = 0; h < kept.heads; ++h) most = std::max(most, kept.host_counts[h]);
    if (most > 0) {
      admit_listed(exec, TypedSpan<Value>::of(span), most, kept, retained.device, pages);
    }
  }

  void save(const ExecutionSpace& exec, const SpanRows& span, const SavedRows& saved,
            bool back) const override {
    save_leaving<Value>(exec, span.step, TypedSpan<Value>::of(span).ring, saved, back);
  }

  void fill_ring(const ExecutionSpace& exec, const SpanRows& span) const override {
    write_ring(exec, TypedSpan<Value>::of(span));
  }

  void compact(const ExecutionSpace& exec, const Block& block, const KeptPart& kept,
               const PagesRef& from, const PagesRef& to) const override {
    if (kept.extent > 0) compact_columns<Value>(exec, block, kept, from, to);
  }
};

}  // namespace

const RowMover& kernel_row_mover(DType dtype) {
  return with_value_type(dtype, [](auto zero) -> const RowMover& {
    static const KernelRowMover<decltype(zero)> mover;
    return mover;
  });
}

}  // namespace kvzap::cache
