#include "attention/portable.hpp"

#include <cmath>

#include "base/soft_cap.hpp"

namespace kvzap::attention {
namespace {

/// Rows with constant strides: cached ones or the caller's new ones.
template <class Value>
struct StridedRows {
  const Value* keys;
  const Value* values;
  std::int64_t rows, row_stride, dim_stride;
};

template <class Value>
void attend_typed(const ExecutionSpace& exec, const AttentionSpan& span,
                  const AttentionCall<Value>& call) {
  using Range = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;
  using Run = StridedRows<Value>;
  // Kernels receive only the base class.
  const RaggedLayer cached = span.cached;  // NOLINT(cppcoreguidelines-slicing)
  const auto queries = call.queries;
  const auto new_keys = call.new_keys;
  const auto new_values = call.new_values;
  const auto output = call.output;
  const auto lse = call.lse;
  const bool wants_lse = call.wants_lse();
  const int group = call.group;
  const int heads = call.kv_heads * group;
  const int dim = call.dim;
  const std::int64_t first_query = span.first_query;
  const std::int64_t first_new = span.first_new;
  const std::int64_t window = span.window;
  const std::int64_t first_seen = span.seen_new_rows(0);
  const std::int64_t more_seen = span.new_rows > 0 ? 1 : 0;  // by each later query
  const float cap = call.soft_cap;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  Kokkos::parallel_for(
      "kvzap::attention::portable", Range(exec, 0, span.queries * heads),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t token = first_query + i / heads;
        const std::int64_t end_new = first_seen + more_seen * (i / heads);
        const std::int64_t begin_new = window > 0 && end_new > window ? end_new - window : 0;
        const int head = static_cast<int>(i % heads);
        const int kv_head = head / group;
        // Pages, then ring, then new rows.
        const std::int64_t n_runs = cached.pages(kv_head) + 2;
        const auto run_of = [&](std::int64_t s) -> Run {
          if (s < n_runs - 1) {
            const auto span = cached.template span<Value>(kv_head, s);
            return {span.keys, span.values, span.rows, dim, 1};
          }
          return {&new_keys(first_new + begin_new, kv_head, 0),
                  &new_values(first_new + begin_new, kv_head, 0), end_new - begin_new,
                  static_cast<std::int64_t>(new_keys.stride(0)),
                  static_cast<std::int64_t>(new_keys.stride(2))};
        };
        const bool packed = cached.format.keys != RowType::wide;
        const auto is_packed = [&](std::int64_t s) { return packed && s < n_runs - 2; };
        const auto score_of = [&](const Run& run, std::int64_t s, std::int64_t row) {
          float score = 0;
          for (int d = 0; d < dim; ++d) {
            const float key =
                is_packed(s)
                    ? cached.packed(kv_head, s, false).at(row, d)
                    : static_cast<float>(run.keys[row * run.row_stride + d * run.dim_stride]);
            score += queries(token, head, d) * key;
          }
          return cap > 0 ? base::soft_capped(score * scale, cap) : score * scale;
        };
        float maximum = minus_infinity;
        for (std::int64_t s = 0; s < n_runs; ++s) {
          const Run run = run_of(s);
          for (std::int64_t r = 0; r < run.rows; ++r) {
            const float score = score_of(run, s, r);
            if (score > maximum) maximum = score;
          }
        }
        float weight = 0;
        for (int d = 0; d < dim; ++d) output(token, head, d) = 0;
        for (std::int64_t s = 0; s < n_runs; ++s) {
          const Run run = run_of(s);
          for (std::int64_t r = 0; r < run.rows; ++r) {
            const float p = base::math::exp(score_of(run, s, r) - shift_of(maximum));
            weight += p;
            for (int d = 0; d < dim; ++d) {
              const float value =
                  is_packed(s)
                      ? cached.packed(kv_head, s, true).at(r, d)
                      : static_cast<float>(run.values[r * run.row_stride + d * run.dim_stride]);
              output(token, head, d) += p * value;
            }
          }
        }
        const float inverse = inverse_of(weight);
        for (int d = 0; d < dim; ++d) output(token, head, d) *= inverse;
        if (wants_lse) lse(token, head) = log_sum_exp(maximum, weight);
      });
}

}  // namespace

void attend_portable(const ExecutionSpace& exec, const AttentionSpan& span,
                     const BasicCall<ConstArrayView>& call) {
  with_value_type(call.new_keys.dtype,
                  [&](auto zero) { attend_typed(exec, span, call.as<decltype(zero)>()); });
}

}  // namespace kvzap::attention
