// Matrix products that are blocked for registers, and the packing of their rows.
#pragma once

#include <cstdint>

#include "attention/host/vector_math.hpp"

// Within a block of rows that a kernel works on, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace kvzap::attention {

// Rows, and vectors of 16 columns, of the block of sums that a matrix product keeps in registers.
constexpr int block_rows(bool pairs) { return pairs ? 6 : 12; }
constexpr int block_vectors(bool pairs) { return pairs ? 4 : 2; }

}  // namespace kvzap::attention

#if KVZAP_X86
namespace kvzap::attention {

template <int R, int V>
KVZAP_INLINE_AVX512 void load_block(__m512* sum, const float* c, std::int64_t c_stride,
                                    const float* factor) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      sum[r * V + v] = factor ? _mm512_mul_ps(_mm512_load_ps(c + r * c_stride + v * 16),
                                              _mm512_set1_ps(factor[r]))
                              : _mm512_setzero_ps();
    }
  }
}

template <int R, int V>
KVZAP_INLINE_AVX512 void store_block(const __m512* sum, float* c, std::int64_t c_stride) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) _mm512_store_ps(c + r * c_stride + v * 16, sum[r * V + v]);
  }
}

/// c (R, 16 V) = factor * c + a (R, steps) * b (steps, 16 V); factor[r] for row r, 0 if null.
template <int R, int V>
KVZAP_TARGET_AVX512 void multiply_floats(int steps, const float* a, std::int64_t a_stride,
                                         const float* b, float* c, std::int64_t c_stride,
                                         const float* factor) {
  __m512 sum[R * V];
  load_block<R, V>(sum, c, c_stride, factor);
  for (int s = 0; s < steps; ++s, b += 16 * V) {
    __m512 column[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) column[v] = _mm512_load_ps(b + v * 16);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const __m512 x = _mm512_set1_ps(a[r * a_stride + s]);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sum[r * V + v] = _mm512_fmadd_ps(x, column[v], sum[r * V + v]);
    }
  }
  store_block<R, V>(sum, c, c_stride);
}

/// The same where words of a and b are pairs of bfloat16.
template <int R, int V>
KVZAP_TARGET_AVX512_BF16 void multiply_pairs(int steps, const float* a, std::int64_t a_stride,
                                             const float* b, float* c, std::int64_t c_stride,
                                             const float* factor) {
  __m512 sum[R * V];
  load_block<R, V>(sum, c, c_stride, factor);
  for (int s = 0; s < steps; ++s, b += 16 * V) {
    __m512bh column[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) column[v] = (__m512bh)_mm512_load_ps(b + v * 16);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const __m512bh x = (__m512bh)_mm512_set1_ps(a[r * a_stride + s]);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) {
        sum[r * V + v] = _mm512_dpbf16_ps(sum[r * V + v], x, column[v]);
      }
    }
  }
  store_block<R, V>(sum, c, c_stride);
}

/// target[j * target_stride + i] = source[i * source_stride + j] for 16 x 16 words.
KVZAP_TARGET_AVX512 inline void transpose(const float* source, std::int64_t source_stride,
                                          float* target, std::int64_t target_stride) {
  __m512 a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_load_ps(source + i * source_stride);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    for (int h = 0; h < 2; ++h) {
      const __m512d x = _mm512_castps_pd(b[i + h]), y = _mm512_castps_pd(b[i + 2 + h]);
      a[i + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
      a[i + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
    }
  }
  // a[4 g + k], 128-bit lane l: words 4 l + k of rows 4 g .. 4 g + 3.
#pragma GCC unroll 16
  for (int k = 0; k < 4; ++k) {
    b[k] = _mm512_shuffle_f32x4(a[k], a[4 + k], 0x88);
    b[4 + k] = _mm512_shuffle_f32x4(a[8 + k], a[12 + k], 0x88);
    b[8 + k] = _mm512_shuffle_f32x4(a[k], a[4 + k], 0xdd);
    b[12 + k] = _mm512_shuffle_f32x4(a[8 + k], a[12 + k], 0xdd);
  }
#pragma GCC unroll 16
  for (int k = 0; k < 4; ++k) {
    _mm512_store_ps(target + k * target_stride, _mm512_shuffle_f32x4(b[k], b[4 + k], 0x88));
    _mm512_store_ps(target + (8 + k) * target_stride, _mm512_shuffle_f32x4(b[k], b[4 + k], 0xdd));
    _mm512_store_ps(target + (4 + k) * target_stride,
                    _mm512_shuffle_f32x4(b[8 + k], b[12 + k], 0x88));
    _mm512_store_ps(target + (12 + k) * target_stride,
                    _mm512_shuffle_f32x4(b[8 + k], b[12 + k], 0xdd));
  }
}

/// target[c] = the pair of source (even row)[c] and (odd row)[c].
KVZAP_TARGET_AVX512 inline void interleave(const std::uint16_t* even, const std::uint16_t* odd,
                                           float* target, int columns) {
  for (int c = 0; c < columns; c += 16) {
    const __m512i low =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + c)));
    const __m512i high =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd + c)));
    _mm512_store_si512(target + c, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
}

/// Packs rows of keys (padded_keys, words), aligned, into panels [panel][word][key] of `width`
/// keys.
inline void pack_keys(const float* rows, int padded_keys, int words, int width, float* target) {
  for (int k = 0; k < padded_keys; k += 16) {
    float* const panel = target + std::int64_t{k / width * width} * words + k % width;
    for (int w = 0; w < words; w += 16) {
      transpose(rows + std::int64_t{k} * words + w, words, panel + w * width, width);
    }
  }
}

}  // namespace kvzap::attention
#endif

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
