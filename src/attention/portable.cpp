#include "attention/portable.hpp"

#include <cmath>

#include "base/soft_cap.hpp"

namespace kvzap::attention {
namespace {

template <class Value>
void attend_typed(const ExecutionSpace& exec, const AttentionSpan& span,
                  const AttentionCall& call) {
  using Range = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;
  // Kernels receive only the base class.
  const RaggedLayer cached = span.cached;  // NOLINT(cppcoreguidelines-slicing)
  const auto queries = call.queries;
  const NewRows<Value> new_rows(span, call.new_keys, call.new_values);
  const auto output = call.output;
  const auto lse = call.lse;
  const bool wants_lse = call.wants_lse();
  const int group = call.group;
  const int heads = call.kv_heads * group;
  const int dim = call.dim;
  const std::int64_t first_query = span.first_query;
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
        HeadRows<Value> rows{cached, kv_head, RingOrder::slots,
                             new_rows.of_head(kv_head, begin_new)};
        rows.fresh.rows = end_new - begin_new;
        // Calls work(key, value), functions of a dimension, for each row.
        const auto for_each_row = [&](const auto& work) {
          for (std::int64_t row = 0; row < rows.rows(); ++row) {
            if (cached.is_packed(kv_head, row)) {
              const std::int64_t page = row / cached.page_rows, slot = row % cached.page_rows;
              const QuantisedRows keys = cached.quantised(kv_head, page, false);
              const QuantisedRows values = cached.quantised(kv_head, page, true);
              work([&](int d) { return keys.at(slot, d); },
                   [&](int d) { return values.at(slot, d); });
            } else {
              const RowRun<Value> run = rows.run(row, row + 1);
              work([&](int d) { return static_cast<float>(run.keys[d * run.dim_stride]); },
                   [&](int d) { return static_cast<float>(run.values[d * run.dim_stride]); });
            }
          }
        };
        const auto score_of = [&](const auto& key) {
          float score = 0;
          for (int d = 0; d < dim; ++d) score += queries(token, head, d) * key(d);
          return cap > 0 ? base::soft_capped(score * scale, cap) : score * scale;
        };
        float maximum = minus_infinity;
        for_each_row([&](const auto& key, const auto& /*value*/) {
          const float score = score_of(key);
          if (score > maximum) maximum = score;
        });
        float weight = 0;
        for (int d = 0; d < dim; ++d) output(token, head, d) = 0;
        for_each_row([&](const auto& key, const auto& value) {
          const float p = base::math::exp(score_of(key) - shift_of(maximum));
          weight += p;
          for (int d = 0; d < dim; ++d) output(token, head, d) += p * value(d);
        });
        const float inverse = inverse_of(weight);
        for (int d = 0; d < dim; ++d) output(token, head, d) *= inverse;
        if (wants_lse) lse(token, head) = log_sum_exp(maximum, weight);
      });
}

}  // namespace

void attend_portable(const ExecutionSpace& exec, const AttentionSpan& span,
                     const AttentionCall& call) {
  with_value_type(call.dtype(), [&](auto zero) { attend_typed<decltype(zero)>(exec, span, call); });
}

}  // namespace kvzap::attention
