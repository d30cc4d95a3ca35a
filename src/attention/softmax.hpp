// The shift, divisor and empty result of a softmax, the same on every path.
#pragma once

#include <limits>

#include "base/kokkos_compat.hpp"

namespace kvzap::attention {

inline constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

/// Returns the shift to subtract from scores before exp: their maximum. Returns 0 if all scores are
/// -infinity, because the difference would be NaN.
KOKKOS_INLINE_FUNCTION float shift_of(float maximum) {
  return maximum == minus_infinity ? 0.0f : maximum;
}

/// Returns the factor that turns a query's weighted sums into its result. If no row has any weight,
/// the result is 0, not NaN. A NaN stays NaN.
KOKKOS_INLINE_FUNCTION float inverse_of(float weight) { return weight == 0 ? 0.0f : 1.0f / weight; }

/// maximum: largest scaled score; weight: sum of exp(score - shift_of(maximum)).
KOKKOS_INLINE_FUNCTION float log_sum_exp(float maximum, float weight) {
  return weight == 0 ? minus_infinity : shift_of(maximum) + base::math::log(weight);
}

}  // namespace kvzap::attention
