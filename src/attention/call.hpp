// What the implementations of attention share: the views of a call, where a head's rows lie, and
// what a softmax gives where nothing is visible.
#pragma once

#include <algorithm>
#include <kvzap/attention.hpp>
#include <limits>

#include "base/kokkos_compat.hpp"

namespace kvzap::detail {

/// The views of one call, whose extents fit each other, and what follows from them.
template <class Value, PageOrder order>
struct AttentionCall {
  using Span = AttentionSpan<Value, order>;

  typename Attention<Value, order>::QueryView queries;
  typename Attention<Value, order>::RowsView new_keys;
  typename Attention<Value, order>::RowsView new_values;
  typename Attention<Value, order>::OutputView output;
  LogSumExpView lse;  // may be empty
  int kv_heads = 0;   // > 0
  int group = 1;
  int dim = 1;

  bool wants_lse() const { return lse.extent(0) > 0; }
};

/// What is subtracted from scores before exp: their maximum, but 0 where all are -infinity, as the
/// difference would be NaN.
KOKKOS_INLINE_FUNCTION float shift_of(float maximum) {
  return maximum == -std::numeric_limits<float>::infinity() ? 0.0f : maximum;
}

/// What a query's weighted sums are multiplied by in the end. Where no row weighs anything, the
/// result is 0, not NaN; a NaN stays one.
KOKKOS_INLINE_FUNCTION float inverse_of(float weight) { return weight == 0 ? 0.0f : 1.0f / weight; }

/// maximum: largest scaled score; weight: sum of exp(score - shift_of(maximum)).
KOKKOS_INLINE_FUNCTION float log_sum_exp(float maximum, float weight) {
  return weight == 0 ? -std::numeric_limits<float>::infinity()
                     : shift_of(maximum) + math::log(weight);
}

}  // namespace kvzap::detail
