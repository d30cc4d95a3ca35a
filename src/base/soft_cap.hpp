// Soft caps: cap * tanh(x / cap) (Gemma 2, arXiv 2408.00118, section 2).
#pragma once

#include "base/exp_nonpositive.hpp"
#include "base/kokkos_compat.hpp"

namespace kvzap::base {

/// Returns cap * tanh(x / cap), on hosts and devices. inverse: 1 / cap.
KOKKOS_INLINE_FUNCTION float soft_capped(float x, float cap, float inverse) {
  return cap * math::tanh(x * inverse);
}
KOKKOS_INLINE_FUNCTION float soft_capped(float x, float cap) {
  return soft_capped(x, cap, 1.0f / cap);
}

/// tanh within 3 units in the last place: Cephes' tanhf, without branches, so loops vectorize. NaN
/// gives NaN.
KVZAP_BODY float tanh_without_branches(float x) {
  const float size = x < 0 ? -x : x;
  const float z = x * x;
  float p = -5.70498872745e-3f;
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const float near_zero = p * z * x + x;
  const float e = exp_nonpositive(-2.0f * size);
  const float far = (1.0f - e) / (1.0f + e);
  return size < 0.625f ? near_zero : (x < 0 ? -far : far);
}

}  // namespace kvzap::base
