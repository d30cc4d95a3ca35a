// An exponential that inner loops on the host can vectorize.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>

#include "base/simd.hpp"

namespace kvzap::base {

// exp for x <= 0 by range reduction and a degree-6 polynomial (Cephes' expf). It has no branches,
// so loops vectorize. Below -87.3, where the result would be subnormal, it is 0.
KVZAP_BODY float exp_nonpositive(float x) {
  const float clamped = x < -87.3f ? -87.3f : x;
  constexpr float round_to_integer = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer part
  const float biased = clamped * 1.44269504f + round_to_integer;
  const float n = biased - round_to_integer;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const std::uint32_t exponent = (float_bits(biased) - float_bits(round_to_integer) + 127u) << 23;
  const float result = p * bits_float(exponent);
  return x == x ? (x < -87.3f ? 0.0f : result) : x;
}

}  // namespace kvzap::base
