// The normal distribution, for GELU in inner loops on the host.
#pragma once

#include <cmath>

#include "base/exp_nonpositive.hpp"

namespace kvzap::base {

struct NormalTail {
  float density;  // exp(-x^2 / 2), not divided by sqrt(2 pi)
  float below;    // share of a normal distribution below x
};

/// Uses the erf of Abramowitz and Stegun, 7.1.26, whose error is below 1.5e-7.
KVZAP_BODY NormalTail normal_tail(float x) {
  const float z = std::fabs(x) * 0.70710678f;
  const float t = 1.0f / (1.0f + 0.3275911f * z);
  float p = 1.061405429f;
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const float density = exp_nonpositive(-z * z);
  const float tail = 0.5f * p * t * density;
  return {density, x < 0 ? tail : 1.0f - tail};
}

}  // namespace kvzap::base
