#include "linalg/host/row_products.hpp"

#include <algorithm>
#include <type_traits>

#include "base/simd.hpp"
#include "linalg/host/row_kernels.hpp"

#if KVZAP_X86
#include <immintrin.h>
#endif

// Within a block of rows that a kernel works on, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace kvzap::linalg {
namespace {

/// Calls `run` with n_rows as a compile-time constant.
template <class Run>
void with_rows(int n_rows, const Run& run) {
  switch (n_rows) {
    case 1:
      return run(std::integral_constant<int, 1>{});
    case 2:
      return run(std::integral_constant<int, 2>{});
    case 3:
      return run(std::integral_constant<int, 3>{});
    case 4:
      return run(std::integral_constant<int, 4>{});
    case 5:
      return run(std::integral_constant<int, 5>{});
    case 6:
      return run(std::integral_constant<int, 6>{});
    case 7:
      return run(std::integral_constant<int, 7>{});
    case 8:
      return run(std::integral_constant<int, 8>{});
  }
}

#if KVZAP_X86

/// Prefetches the lines of `count` values from `values` on. The addresses may lie behind the
/// weights; they are not read.
template <class Value>
inline void prefetch(const Value* values, std::int64_t count) {
  constexpr std::int64_t line = 64 / sizeof(Value);
  for (std::int64_t i = 0; i < count; i += line) {
    __builtin_prefetch(reinterpret_cast<const char*>(values + i), 0, 2);
  }
}

KVZAP_TARGET_AVX512 inline __m512 load16(const float* p) { return _mm512_loadu_ps(p); }
KVZAP_TARGET_AVX512 inline __m512 load16(const half* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
KVZAP_TARGET_AVX512 inline __m512 load16(const bfloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

/// Rounds as the constructor of bfloat16 does.
KVZAP_TARGET_AVX512 inline __m512 rounded(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i nearest = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  const __m512i either = _mm512_mask_blend_epi32(is_nan, nearest, quiet);
  return _mm512_castsi512_ps(_mm512_and_si512(either, _mm512_set1_epi32(-0x10000)));
}
KVZAP_TARGET_AVX512 inline __m512 load16(const RoundedFloat* p) {
  return rounded(_mm512_loadu_ps(&p->value));
}

KVZAP_TARGET_AVX512 inline __m512 load16(const float* p, __mmask16 mask) {
  return _mm512_maskz_loadu_ps(mask, p);
}
KVZAP_TARGET_AVX512 inline __m512 load16(const half* p, __mmask16 mask) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p));
}
KVZAP_TARGET_AVX512 inline __m512 load16(const bfloat16* p, __mmask16 mask) {
  const __m256i bits = _mm256_maskz_loadu_epi16(mask, p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
KVZAP_TARGET_AVX512 inline __m512 load16(const RoundedFloat* p, __mmask16 mask) {
  return rounded(_mm512_maskz_loadu_ps(mask, &p->value));
}

/// Outputs neighbouring outputs of Rows rows. Several outputs at once save loads of x, but they are
/// several streams, which the processor's prefetcher does not follow. The rows behind them are
/// therefore prefetched in memory order and later found in the second-level cache.
template <int Rows, int Outputs, class Value>
KVZAP_TARGET_AVX512 void products_avx512(const float* x, std::int64_t x_stride,
                                         const Value* weights, std::int64_t weights_stride,
                                         std::int64_t inputs, float* y, std::int64_t y_stride) {
  const Value* next = weights + Outputs * weights_stride;
  __m512 sums[Rows][Outputs];
  for (int m = 0; m < Rows; ++m) {
    for (int n = 0; n < Outputs; ++n) sums[m][n] = _mm512_setzero_ps();
  }
  std::int64_t k = 0;
  for (; k + 16 <= inputs; k += 16) {
    prefetch(next + k * Outputs, 16 * Outputs);
    __m512 w[Outputs];
    for (int n = 0; n < Outputs; ++n) w[n] = load16(weights + n * weights_stride + k);
    for (int m = 0; m < Rows; ++m) {
      const __m512 row = load16(x + m * x_stride + k);
      for (int n = 0; n < Outputs; ++n) sums[m][n] = _mm512_fmadd_ps(w[n], row, sums[m][n]);
    }
  }
  if (k < inputs) {
    const auto mask = static_cast<__mmask16>((1u << (inputs - k)) - 1);
    for (int n = 0; n < Outputs; ++n) {
      const __m512 w = load16(weights + n * weights_stride + k, mask);
      for (int m = 0; m < Rows; ++m) {
        sums[m][n] = _mm512_fmadd_ps(w, load16(x + m * x_stride + k, mask), sums[m][n]);
      }
    }
  }
  for (int m = 0; m < Rows; ++m) {
    for (int n = 0; n < Outputs; ++n) y[m * y_stride + n] = _mm512_reduce_add_ps(sums[m][n]);
  }
}

/// Neighbouring outputs of one row of x, one after the other in memory order. There are no other
/// rows to save loads for, and the processor's own prefetcher is faster than prefetch instructions.
/// There are enough sums to hide the latency of an addition.
template <class Value>
KVZAP_TARGET_AVX512 void one_row_avx512(const float* x, const Value* weights,
                                        std::int64_t weights_stride, std::int64_t outputs,
                                        std::int64_t inputs, float* y) {
  for (std::int64_t n = 0; n < outputs; ++n) {
    const Value* row = weights + n * weights_stride;
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    std::int64_t k = 0;
    for (; k + 32 <= inputs; k += 32) {
      even = _mm512_fmadd_ps(load16(row + k), load16(x + k), even);
      odd = _mm512_fmadd_ps(load16(row + k + 16), load16(x + k + 16), odd);
    }
    for (; k < inputs; k += 16) {
      const std::int64_t left = std::min<std::int64_t>(16, inputs - k);
      const auto mask = static_cast<__mmask16>((1u << left) - 1);
      even = _mm512_fmadd_ps(load16(row + k, mask), load16(x + k, mask), even);
    }
    y[n] = _mm512_reduce_add_ps(_mm512_add_ps(even, odd));
  }
}

KVZAP_TARGET_AVX2 inline __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
KVZAP_TARGET_AVX2 inline __m256 load8(const half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
KVZAP_TARGET_AVX2 inline __m256 load8(const bfloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
KVZAP_TARGET_AVX2 inline __m256 load8(const RoundedFloat* p) {
  const __m256 values = _mm256_loadu_ps(&p->value);
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i nearest = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
  const __m256 either =
      _mm256_blendv_ps(_mm256_castsi256_ps(nearest), _mm256_castsi256_ps(quiet), is_nan);
  return _mm256_and_ps(either, _mm256_castsi256_ps(_mm256_set1_epi32(-0x10000)));
}

KVZAP_TARGET_AVX2 inline float sum_of(__m256 v) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

/// The same with AVX2.
template <int Rows, int Outputs, class Value>
KVZAP_TARGET_AVX2 void products_avx2(const float* x, std::int64_t x_stride, const Value* weights,
                                     std::int64_t weights_stride, std::int64_t inputs, float* y,
                                     std::int64_t y_stride) {
  const Value* next = weights + Outputs * weights_stride;
  const std::int64_t whole = inputs / 16 * 16;
  __m256 sums[Rows][Outputs];
  for (int m = 0; m < Rows; ++m) {
    for (int n = 0; n < Outputs; ++n) sums[m][n] = _mm256_setzero_ps();
  }
  for (std::int64_t k = 0; k < whole; k += 16) {
    prefetch(next + k * Outputs, 16 * Outputs);
    for (std::int64_t half_line = k; half_line < k + 16; half_line += 8) {
      __m256 w[Outputs];
      for (int n = 0; n < Outputs; ++n) w[n] = load8(weights + n * weights_stride + half_line);
      for (int m = 0; m < Rows; ++m) {
        const __m256 row = load8(x + m * x_stride + half_line);
        for (int n = 0; n < Outputs; ++n) sums[m][n] = _mm256_fmadd_ps(w[n], row, sums[m][n]);
      }
    }
  }
  for (int m = 0; m < Rows; ++m) {
    for (int n = 0; n < Outputs; ++n) {
      float sum = sum_of(sums[m][n]);
      for (std::int64_t k = whole; k < inputs; ++k) {
        sum += static_cast<float>(weights[n * weights_stride + k]) * x[m * x_stride + k];
      }
      y[m * y_stride + n] = sum;
    }
  }
}

/// Outputs of one row of x, as above.
template <class Value>
KVZAP_TARGET_AVX2 void one_row_avx2(const float* x, const Value* weights,
                                    std::int64_t weights_stride, std::int64_t outputs,
                                    std::int64_t inputs, float* y) {
  constexpr int chains = 4;
  for (std::int64_t n = 0; n < outputs; ++n) {
    const Value* row = weights + n * weights_stride;
    __m256 sums[chains];
    for (__m256& sum : sums) sum = _mm256_setzero_ps();
    std::int64_t k = 0;
    for (; k + 8 * chains <= inputs; k += 8 * chains) {
      for (int c = 0; c < chains; ++c) {
        sums[c] = _mm256_fmadd_ps(load8(row + k + 8 * c), load8(x + k + 8 * c), sums[c]);
      }
    }
    for (; k + 8 <= inputs; k += 8) {
      sums[0] = _mm256_fmadd_ps(load8(row + k), load8(x + k), sums[0]);
    }
    float sum =
        sum_of(_mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3])));
    for (; k < inputs; ++k) sum += static_cast<float>(row[k]) * x[k];
    y[n] = sum;
  }
}

KVZAP_TARGET_AVX512_BF16 inline __m512bh load_bf16(const bfloat16* p) {
  return (__m512bh)_mm512_loadu_si512(p);
}
KVZAP_TARGET_AVX512_BF16 inline __m512bh load_bf16(const bfloat16* p, std::int64_t count) {
  return (__m512bh)_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << count) - 1), p);
}

/// One output of Rows rows. Weights are read row by row: several rows at once would be several
/// streams in one memory page, which the processor's prefetcher does not follow.
template <int Rows>
KVZAP_TARGET_AVX512_BF16 void bf16_products(const bfloat16* x, std::int64_t x_stride,
                                            const bfloat16* weights, std::int64_t weights_stride,
                                            std::int64_t outputs, std::int64_t inputs, float* y,
                                            std::int64_t y_stride) {
  // Independent sums hide the latency of the dot product; several rows have enough of them.
  constexpr int chains = Rows >= 4 ? 1 : (Rows >= 2 ? 2 : 4);
  for (std::int64_t n = 0; n < outputs; ++n) {
    const bfloat16* row = weights + n * weights_stride;
    __m512 sums[chains][Rows];
    for (int c = 0; c < chains; ++c) {
      for (int m = 0; m < Rows; ++m) sums[c][m] = _mm512_setzero_ps();
    }
    std::int64_t k = 0;
    for (; k + 32 * chains <= inputs; k += 32 * chains) {
      for (int c = 0; c < chains; ++c) {
        const __m512bh w = load_bf16(row + k + 32 * c);
        for (int m = 0; m < Rows; ++m) {
          sums[c][m] = _mm512_dpbf16_ps(sums[c][m], w, load_bf16(x + m * x_stride + k + 32 * c));
        }
      }
    }
    for (; k < inputs; k += 32) {
      const std::int64_t count = std::min<std::int64_t>(32, inputs - k);
      const __m512bh w = load_bf16(row + k, count);
      for (int m = 0; m < Rows; ++m) {
        sums[0][m] = _mm512_dpbf16_ps(sums[0][m], w, load_bf16(x + m * x_stride + k, count));
      }
    }
    for (int m = 0; m < Rows; ++m) {
      __m512 sum = sums[0][m];
      for (int c = 1; c < chains; ++c) sum = _mm512_add_ps(sum, sums[c][m]);
      y[m * y_stride + n] = _mm512_reduce_add_ps(sum);
    }
  }
}

#endif

template <class Value>
void float_products(const float* x, std::int64_t x_stride, int n_rows, const Value* weights,
                    std::int64_t weights_stride, std::int64_t outputs, std::int64_t inputs,
                    float* y, std::int64_t y_stride) {
#if KVZAP_X86
  // Computes as many outputs at once as their sums fit in registers, and the remaining ones one at
  // a time.
  const auto all_outputs = [&](auto at_once, const auto& some, const auto& one) {
    std::int64_t n = 0;
    for (; n + at_once <= outputs; n += at_once) {
      some(x, x_stride, weights + n * weights_stride, weights_stride, inputs, y + n, y_stride);
    }
    for (; n < outputs; ++n) {
      one(x, x_stride, weights + n * weights_stride, weights_stride, inputs, y + n, y_stride);
    }
  };
  const base::SimdLevel level = base::machine().simd();
  if (level >= base::SimdLevel::avx512) {
    return with_rows(n_rows, [&](auto rows) {
      if constexpr (rows == 1) {
        one_row_avx512(x, weights, weights_stride, outputs, inputs, y);
      } else {
        constexpr int at_once = rows == 2 ? 8 : rows <= 6 ? 4 : 3;
        all_outputs(at_once, products_avx512<rows, at_once, Value>,
                    products_avx512<rows, 1, Value>);
      }
    });
  }
  if (level == base::SimdLevel::avx2) {
    return with_rows(n_rows, [&](auto rows) {
      if constexpr (rows == 1) {
        one_row_avx2(x, weights, weights_stride, outputs, inputs, y);
      } else {
        constexpr int at_once = rows == 2 ? 4 : rows <= 4 ? 3 : rows <= 6 ? 2 : 1;
        all_outputs(at_once, products_avx2<rows, at_once, Value>, products_avx2<rows, 1, Value>);
      }
    });
  }
#endif
  if constexpr (!std::is_same_v<Value, RoundedFloat>) {
    for (std::int64_t n = 0; n < outputs; ++n) {
      for (int m = 0; m < n_rows; ++m) {
        score_rows(weights + n * weights_stride, weights_stride, 1, 1, x + m * x_stride, 1,
                   static_cast<int>(inputs), y + m * y_stride + n, 1);
      }
    }
  }
}

}  // namespace

void skinny_product(const float* x, std::int64_t x_stride, int n_rows, const float* weights,
                    std::int64_t weights_stride, std::int64_t outputs, std::int64_t inputs,
                    float* y, std::int64_t y_stride) {
  float_products(x, x_stride, n_rows, weights, weights_stride, outputs, inputs, y, y_stride);
}
void skinny_product(const float* x, std::int64_t x_stride, int n_rows, const half* weights,
                    std::int64_t weights_stride, std::int64_t outputs, std::int64_t inputs,
                    float* y, std::int64_t y_stride) {
  float_products(x, x_stride, n_rows, weights, weights_stride, outputs, inputs, y, y_stride);
}
void skinny_product(const float* x, std::int64_t x_stride, int n_rows, const bfloat16* weights,
                    std::int64_t weights_stride, std::int64_t outputs, std::int64_t inputs,
                    float* y, std::int64_t y_stride) {
  float_products(x, x_stride, n_rows, weights, weights_stride, outputs, inputs, y, y_stride);
}

void skinny_product(const float* x, std::int64_t x_stride, int n_rows, const RoundedFloat* weights,
                    std::int64_t weights_stride, std::int64_t outputs, std::int64_t inputs,
                    float* y, std::int64_t y_stride) {
  float_products(x, x_stride, n_rows, weights, weights_stride, outputs, inputs, y, y_stride);
}

void skinny_product([[maybe_unused]] const bfloat16* x, [[maybe_unused]] std::int64_t x_stride,
                    [[maybe_unused]] int n_rows, [[maybe_unused]] const bfloat16* weights,
                    [[maybe_unused]] std::int64_t weights_stride,
                    [[maybe_unused]] std::int64_t outputs, [[maybe_unused]] std::int64_t inputs,
                    [[maybe_unused]] float* y, [[maybe_unused]] std::int64_t y_stride) {
#if KVZAP_X86
  with_rows(n_rows, [&](auto rows) {
    bf16_products<rows>(x, x_stride, weights, weights_stride, outputs, inputs, y, y_stride);
  });
#endif
}

}  // namespace kvzap::linalg

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
