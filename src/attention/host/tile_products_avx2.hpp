// The matrix products, packing and softmax of attention's tiles for processors with AVX2 and FMA.
// They take only floats. See tile_products.hpp.
#pragma once

#include <cmath>

#include "attention/host/vector_math.hpp"
#include "attention/softmax.hpp"

#if KVZAP_X86

// Within a block of rows that a kernel works on, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace kvzap::attention {

// Rows and columns of the block of sums that a product keeps in 12 of the 16 registers.
constexpr int avx2_block_rows = 6;
constexpr int avx2_block_columns = 16;

/// low and high (6, 8 each) += a (6) * b (16) for one step. Rows 0 to 2 and rows 3 to 5 are
/// addressed by one register each and multiples of the stride.
KVZAP_INLINE_AVX2 void add_step_avx2(const float* upper, const float* lower, std::int64_t a_stride,
                                     const float* b, __m256 (&low)[avx2_block_rows],
                                     __m256 (&high)[avx2_block_rows]) {
  const __m256 left = _mm256_load_ps(b);
  const __m256 right = _mm256_load_ps(b + 8);
#pragma GCC unroll 6
  for (int r = 0; r < avx2_block_rows; ++r) {
    const __m256 x = _mm256_broadcast_ss((r < 3 ? upper : lower) + r % 3 * a_stride);
    low[r] = _mm256_fmadd_ps(x, left, low[r]);
    high[r] = _mm256_fmadd_ps(x, right, high[r]);
  }
}

/// c (6, 16) = factor * c + a (6, steps) * b (steps, 16); factor[r] for row r, 0 if null.
KVZAP_TARGET_AVX2 inline void multiply_floats_avx2(int steps, const float* a, std::int64_t a_stride,
                                                   const float* b, float* c, std::int64_t c_stride,
                                                   const float* factor) {
  constexpr int R = avx2_block_rows;
  __m256 low[R], high[R];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    low[r] = _mm256_setzero_ps();
    high[r] = _mm256_setzero_ps();
  }
  if (factor) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m256 by = _mm256_set1_ps(factor[r]);
      low[r] = _mm256_mul_ps(_mm256_load_ps(c + r * c_stride), by);
      high[r] = _mm256_mul_ps(_mm256_load_ps(c + r * c_stride + 8), by);
    }
  }
  const float* upper = a;
  const float* lower = a + 3 * a_stride;
  // Two steps at once: where another thread shares the core's units, each instruction of the loop
  // itself counts. There they take 0.88 of the time of single steps, on a free core 0.97 (AMD EPYC,
  // Zen 3); four at once take longer on a free core.
  int s = 0;
#pragma GCC unroll 1
  for (; s + 2 <= steps; s += 2, b += 2 * avx2_block_columns, upper += 2, lower += 2) {
    add_step_avx2(upper, lower, a_stride, b, low, high);
    add_step_avx2(upper + 1, lower + 1, a_stride, b + avx2_block_columns, low, high);
  }
  if (s < steps) add_step_avx2(upper, lower, a_stride, b, low, high);
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    _mm256_store_ps(c + r * c_stride, low[r]);
    _mm256_store_ps(c + r * c_stride + 8, high[r]);
  }
}

/// target[j * target_stride + i] = source[i * source_stride + j] for 8 x 8 words.
KVZAP_INLINE_AVX2 void transpose_eight(const float* source, std::int64_t source_stride,
                                       float* target, std::int64_t target_stride) {
  __m256 a[8], b[8];
  // Halves of rows i and i + 4 side by side, so that later steps need not cross 128-bit lanes.
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const float* const near = source + i * source_stride;
    const float* const far = source + (i + 4) * source_stride;
    a[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_load_ps(near)), _mm_load_ps(far), 1);
    a[4 + i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_load_ps(near + 4)),
                                    _mm_load_ps(far + 4), 1);
  }
#pragma GCC unroll 2
  for (int h = 0; h < 8; h += 4) {
    const __m256d even_low = _mm256_castps_pd(_mm256_unpacklo_ps(a[h], a[h + 1]));
    const __m256d even_high = _mm256_castps_pd(_mm256_unpackhi_ps(a[h], a[h + 1]));
    const __m256d odd_low = _mm256_castps_pd(_mm256_unpacklo_ps(a[h + 2], a[h + 3]));
    const __m256d odd_high = _mm256_castps_pd(_mm256_unpackhi_ps(a[h + 2], a[h + 3]));
    b[h] = _mm256_castpd_ps(_mm256_unpacklo_pd(even_low, odd_low));
    b[h + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(even_low, odd_low));
    b[h + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(even_high, odd_high));
    b[h + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(even_high, odd_high));
  }
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) _mm256_store_ps(target + j * target_stride, b[j]);
}

/// Packs rows of keys (padded_keys, words), aligned, into panels [panel][word][key] of 16 keys.
/// words: a multiple of 8.
KVZAP_TARGET_AVX2 inline void pack_keys_avx2(const float* rows, int padded_keys, int words,
                                             float* target) {
  constexpr int width = avx2_block_columns;
  for (int k = 0; k < padded_keys; k += 8) {
    float* const panel = target + std::int64_t{k / width * width} * words + k % width;
    for (int w = 0; w < words; w += 8) {
      transpose_eight(rows + std::int64_t{k} * words + w, words, panel + w * width, width);
    }
  }
}

/// Updates the running maximum of a row with `count` >= 1 scores. Replaces them by exponentials,
/// and those after them up to `padded`, a multiple of 8, by 0. factor: rescales earlier weights and
/// sums.
KVZAP_TARGET_AVX2 inline void online_softmax_row_avx2(float* scores, int count, int padded,
                                                      float scaling, float* maximum, float* weight,
                                                      float* factor) {
  const __m256 none = _mm256_set1_ps(minus_infinity);
  const float before = *maximum;
  // max returns its second operand if one is NaN, so NaN never becomes the maximum.
  __m256 largest = _mm256_set1_ps(before);
  int k = 0;
  for (; k + 8 <= count; k += 8) largest = _mm256_max_ps(_mm256_load_ps(scores + k), largest);
  if (k < count) {
    const __m256 own = _mm256_blendv_ps(none, _mm256_load_ps(scores + k),
                                        _mm256_castsi256_ps(lanes_before(count, k)));
    largest = _mm256_max_ps(own, largest);
  }
  __m128 most = _mm_max_ps(_mm256_castps256_ps128(largest), _mm256_extractf128_ps(largest, 1));
  most = _mm_max_ps(most, _mm_movehl_ps(most, most));
  const float now = _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
  *factor = now > before ? std::exp((before - now) * scaling) : 1.0f;
  *maximum = now;
  const __m256 shift = shift_of(_mm256_set1_ps(now));
  const __m256 by = _mm256_set1_ps(scaling);
  __m256 total = _mm256_setzero_ps();
  for (k = 0; k + 8 <= count; k += 8) {
    const __m256 score = _mm256_load_ps(scores + k);
    const __m256 p = exp_nonpositive(_mm256_mul_ps(_mm256_sub_ps(score, shift), by));
    total = _mm256_add_ps(total, p);
    _mm256_store_ps(scores + k, p);
  }
  for (; k < padded; k += 8) {
    const __m256 score = _mm256_load_ps(scores + k);
    const __m256 p = _mm256_and_ps(_mm256_castsi256_ps(lanes_before(count, k)),
                                   exp_nonpositive(_mm256_mul_ps(_mm256_sub_ps(score, shift), by)));
    total = _mm256_add_ps(total, p);
    _mm256_store_ps(scores + k, p);
  }
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(total), _mm256_extractf128_ps(total, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  *weight = *weight * *factor + _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

}  // namespace kvzap::attention

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)

#endif
