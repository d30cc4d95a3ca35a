// What a softmax subtracts, divides by and gives where nothing is visible, the same on every path.
#pragma once

#include <limits>

#include "base/kokkos_compat.hpp"

namespace kvzap::detail {

inline constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

/// What is subtracted from scores before exp: their maximum, but 0 where all are -infinity, as the
/// difference would be NaN.
KOKKOS_INLINE_FUNCTION float shift_of(float maximum) {
  return maximum == minus_infinity ? 0.0f : maximum;
}

/// What a query's weighted sums are multiplied by in the end. Where no row weighs anything, the
/// result is 0, not NaN; a NaN stays one.
KOKKOS_INLINE_FUNCTION float inverse_of(float weight) { return weight == 0 ? 0.0f : 1.0f / weight; }

/// maximum: largest scaled score; weight: sum of exp(score - shift_of(maximum)).
KOKKOS_INLINE_FUNCTION float log_sum_exp(float maximum, float weight) {
  return weight == 0 ? minus_infinity : shift_of(maximum) + math::log(weight);
}

}  // namespace kvzap::detail
