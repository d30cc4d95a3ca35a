// IQ4_NL: scale * table[q], 32 values a block. The steps of the table grow with the magnitude.
//
// A search tries several scales that bring the largest value near an end of the table, and fits a
// scale to the integers of each by weighted least squares.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <kvzap/core/types.hpp>

#include "base/simd.hpp"
#include "gguf/block_encoders.hpp"
#include "gguf/block_search.hpp"

namespace kvzap::gguf {
namespace {

constexpr int table_values = 32;  // of a block
constexpr int levels_of_table = 16;
constexpr float table_of_nl[levels_of_table] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                1,    13,   25,  38,  53,  69,  89,  113};
// Products of the largest value and the inverse scales to try.
constexpr float ends_of_table[] = {-137, -134, -131, -128, -125, -122, -119, -116,
                                   -113, 107,  110,  113,  116,  119,  122,  125};

/// Writes the table's nearest value to each of values * inverse, or its index.
template <bool as_index>
KVZAP_BODY void nearest_in_table(const float* values, float inverse, float* nearest) {
#pragma omp simd
  for (int i = 0; i < table_values; ++i) nearest[i] = as_index ? 0 : table_of_nl[0];
  for (int j = 1; j < levels_of_table; ++j) {
    const float border = (table_of_nl[j - 1] + table_of_nl[j]) / 2;
    const float step = as_index ? 1 : table_of_nl[j] - table_of_nl[j - 1];
#pragma omp simd
    for (int i = 0; i < table_values; ++i) {
      nearest[i] += values[i] * inverse > border ? step : 0.0f;
    }
  }
}

/// Returns the scale with the least weighted squared error.
KVZAP_BODY float fit_table(const float* values, const float* weights, float unit) {
  float best = 0, best_gain = 0;
  for (const float end : ends_of_table) {
    float q[table_values];
    nearest_in_table<false>(values, end * unit, q);
    float qq = 0, qx = 0;
#pragma omp simd reduction(+ : qq, qx)
    for (int i = 0; i < table_values; ++i) {
      qq += weights[i] * q[i] * q[i];
      qx += weights[i] * q[i] * values[i];
    }
    if (qx * qx > best_gain * qq) {
      best_gain = qx * qx / qq;
      best = qx / qq;
    }
  }
  return best;
}

KVZAP_BODY void encode_table(const float* values, std::uint8_t* target) {
  float peak = 0;
  for (int i = 0; i < table_values; ++i) {
    if (std::fabs(values[i]) > std::fabs(peak)) peak = values[i];
  }
  float weights[table_values];
  weigh<table_values>(values, weights);
  const half scale(fit_table(values, weights, inverse_or_zero(peak)));
  std::memcpy(target, &scale, sizeof(scale));
  float q[table_values];
  nearest_in_table<true>(values, inverse_or_zero(static_cast<float>(scale)), q);
  for (int i = 0; i < table_values / 2; ++i) {
    const int low = static_cast<int>(q[i]), high = static_cast<int>(q[i + table_values / 2]);
    target[2 + i] = static_cast<std::uint8_t>(low | high << 4);
  }
}

KVZAP_BODY void encode_iq4_nl_body(const float* values, std::int64_t n_blocks, std::byte* blocks) {
  constexpr int bytes = 18;
  auto target = reinterpret_cast<std::uint8_t*>(blocks);
  for (std::int64_t i = 0; i < n_blocks; ++i) {
    encode_table(values, target);
    values += table_values;
    target += bytes;
  }
}

}  // namespace

KVZAP_KERNEL(void, encode_iq4_nl, (const float* values, std::int64_t n_blocks, std::byte* blocks),
             (values, n_blocks, blocks))

}  // namespace kvzap::gguf
