// Parts of the searches for the scales of blocks. Kernels include them (base/simd.hpp).
#pragma once

#include <cmath>

#include "base/simd.hpp"

namespace kvzap::gguf {

/// Returns 1 / scale, or 0 for a scale that is zero or too small to have an inverse.
KVZAP_BODY float inverse_or_zero(float scale) {
  constexpr float least = 1e-30f;
  return scale > -least && scale < least ? 0.0f : 1.0f / scale;
}

/// Writes the weights of a group's squared errors: large values matter more to products.
template <int count>
KVZAP_BODY void weigh(const float* values, float* weights) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int i = 0; i < count; ++i) squares += values[i] * values[i];
  const float rms = std::sqrt(squares / count);
#pragma omp simd
  for (int i = 0; i < count; ++i) weights[i] = rms + std::fabs(values[i]);
}

}  // namespace kvzap::gguf
