#include "linalg/host/packed_kernels.hpp"

#include <algorithm>
#include <cstring>

#include "base/simd.hpp"
#include "linalg/host/packed_avx2.hpp"
#include "linalg/host/row_kernels.hpp"
#include "linalg/linear_weights.hpp"
#include "linalg/rounded_rows.hpp"

#if KVZAP_X86
#include <immintrin.h>
#endif

// Within a block of rows that a kernel works on, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace kvzap::linalg {

#if KVZAP_X86
namespace {

constexpr int block_outputs = LinearWeights::block_outputs;
constexpr int width = 16;
constexpr int vectors = block_outputs / width;

// One step of a product reads the inputs that a block stores together for all outputs: a pair of
// inputs in bf16, one input in other types.
template <class Value>
constexpr int step_inputs = std::is_same_v<Value, bfloat16> ? 2 : 1;

KVZAP_TARGET_AVX512 inline __m512 load(const float* p) { return _mm512_loadu_ps(p); }
KVZAP_TARGET_AVX512 inline __m512 load(const half* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

/// Loads sums (Rows, 64) to registers; store_sums writes them back.
template <int Rows>
KVZAP_TARGET_AVX512 inline __attribute__((always_inline)) void load_sums(
    const float* sums, __m512 (&acc)[Rows][vectors]) {
  for (int m = 0; m < Rows; ++m) {
    for (int j = 0; j < vectors; ++j) {
      acc[m][j] = _mm512_load_ps(sums + m * block_outputs + j * width);
    }
  }
}
template <int Rows>
KVZAP_TARGET_AVX512 inline __attribute__((always_inline)) void store_sums(
    const __m512 (&acc)[Rows][vectors], float* sums) {
  for (int m = 0; m < Rows; ++m) {
    for (int j = 0; j < vectors; ++j) {
      _mm512_store_ps(sums + m * block_outputs + j * width, acc[m][j]);
    }
  }
}

/// Adds all outputs of a block for Rows rows over the steps begin .. end - 1 to `sums` (Rows, 64).
template <int Rows, class Value>
KVZAP_TARGET_AVX512 inline __attribute__((always_inline)) void add_steps(
    const float* x, std::int64_t x_stride, const Value* block, std::int64_t begin, std::int64_t end,
    float* sums) {
  __m512 acc[Rows][vectors];
  load_sums(sums, acc);
  for (std::int64_t k = begin; k < end; ++k) {
    __m512 w[vectors];
    for (int j = 0; j < vectors; ++j) w[j] = load(block + k * block_outputs + j * width);
    for (int m = 0; m < Rows; ++m) {
      const __m512 broadcast = _mm512_set1_ps(x[m * x_stride + k]);
      for (int j = 0; j < vectors; ++j) acc[m][j] = _mm512_fmadd_ps(w[j], broadcast, acc[m][j]);
    }
  }
  store_sums(acc, sums);
}

/// The same for pairs of bf16, widened.
template <int Rows>
KVZAP_TARGET_AVX512 inline __attribute__((always_inline)) void add_steps(
    const float* x, std::int64_t x_stride, const bfloat16* block, std::int64_t begin,
    std::int64_t end, float* sums) {
  __m512 acc[Rows][vectors];
  load_sums(sums, acc);
  for (std::int64_t pair = begin; pair < end; ++pair) {
    __m512i w[vectors];
    for (int j = 0; j < vectors; ++j) {
      w[j] = _mm512_loadu_si512(block + 2 * (pair * block_outputs + j * width));
    }
    for (int odd = 0; odd < 2; ++odd) {
      __m512 wide[vectors];
      for (int j = 0; j < vectors; ++j) {
        wide[j] = _mm512_castsi512_ps(odd ? _mm512_and_si512(w[j], _mm512_set1_epi32(-0x10000))
                                          : _mm512_slli_epi32(w[j], 16));
      }
      for (int m = 0; m < Rows; ++m) {
        const __m512 broadcast = _mm512_set1_ps(x[m * x_stride + 2 * pair + odd]);
        for (int j = 0; j < vectors; ++j) {
          acc[m][j] = _mm512_fmadd_ps(wide[j], broadcast, acc[m][j]);
        }
      }
    }
  }
  store_sums(acc, sums);
}

/// The same by dot products of pairs.
template <int Rows>
KVZAP_TARGET_AVX512_BF16 inline __attribute__((always_inline)) void add_steps(
    const bfloat16* x, std::int64_t x_stride, const bfloat16* block, std::int64_t begin,
    std::int64_t end, float* sums) {
  __m512 acc[Rows][vectors];
  load_sums(sums, acc);
  for (std::int64_t pair = begin; pair < end; ++pair) {
    __m512bh w[vectors];
    // 4 KiB ahead. On a core of a Xeon without its AMX one row reads 17 GB/s and not 11.
    for (int j = 0; Rows <= 8 && j < vectors; ++j) {
      constexpr std::int64_t ahead = 4096 / sizeof(bfloat16);
      _mm_prefetch(
          reinterpret_cast<const char*>(block + 2 * (pair * block_outputs + j * width) + ahead),
          _MM_HINT_T1);
    }
    for (int j = 0; j < vectors; ++j) {
      w[j] = (__m512bh)_mm512_loadu_si512(block + 2 * (pair * block_outputs + j * width));
    }
    for (int m = 0; m < Rows; ++m) {
      std::int32_t both;
      std::memcpy(&both, x + m * x_stride + 2 * pair, sizeof(both));
      const __m512bh broadcast = (__m512bh)_mm512_set1_epi32(both);
      for (int j = 0; j < vectors; ++j) acc[m][j] = _mm512_dpbf16_ps(acc[m][j], w[j], broadcast);
    }
  }
  store_sums(acc, sums);
}

/// Steps after which groups of rows take turns; with padding, every number of steps is a multiple.
constexpr std::int64_t turn = 16;

/// Multiplies First rows and the Second rows behind them, in turns.
template <int First, int Second, class Value>
KVZAP_TARGET_AVX512 void add_in_turns(const float* x, std::int64_t x_stride, const Value* block,
                                      std::int64_t begin, std::int64_t end, float* sums) {
  for (std::int64_t k = begin; k < end; k += turn) {
    add_steps<First>(x, x_stride, block, k, k + turn, sums);
    add_steps<Second>(x + First * x_stride, x_stride, block, k, k + turn,
                      sums + First * block_outputs);
  }
}
template <int First, int Second>
KVZAP_TARGET_AVX512_BF16 void add_in_turns(const bfloat16* x, std::int64_t x_stride,
                                           const bfloat16* block, std::int64_t begin,
                                           std::int64_t end, float* sums) {
  for (std::int64_t k = begin; k < end; k += turn) {
    add_steps<First>(x, x_stride, block, k, k + turn, sums);
    add_steps<Second>(x + First * x_stride, x_stride, block, k, k + turn,
                      sums + First * block_outputs);
  }
}

/// The same in one pass.
template <int Rows, class Value>
KVZAP_TARGET_AVX512 void add_at_once(const float* x, std::int64_t x_stride, const Value* block,
                                     std::int64_t begin, std::int64_t end, float* sums) {
  add_steps<Rows>(x, x_stride, block, begin, end, sums);
}
template <int Rows>
KVZAP_TARGET_AVX512_BF16 void add_at_once(const bfloat16* x, std::int64_t x_stride,
                                          const bfloat16* block, std::int64_t begin,
                                          std::int64_t end, float* sums) {
  add_steps<Rows>(x, x_stride, block, begin, end, sums);
}

template <class X, class Value>
void add_some(const X* x, std::int64_t x_stride, int n_rows, const Value* block, std::int64_t begin,
              std::int64_t end, float* sums) {
  switch (n_rows) {
    case 1:
      return add_at_once<1>(x, x_stride, block, begin, end, sums);
    case 2:
      return add_at_once<2>(x, x_stride, block, begin, end, sums);
    case 3:
      return add_at_once<3>(x, x_stride, block, begin, end, sums);
    case 4:
      return add_at_once<4>(x, x_stride, block, begin, end, sums);
    case 5:
      return add_at_once<5>(x, x_stride, block, begin, end, sums);
    case 6:
      return add_at_once<6>(x, x_stride, block, begin, end, sums);
    case 7:
      return add_in_turns<4, 3>(x, x_stride, block, begin, end, sums);
    case 8:
      return add_in_turns<4, 4>(x, x_stride, block, begin, end, sums);
  }
}

template <class X, class Value>
void product(const X* x, std::int64_t x_stride, int n_rows, const Value* block,
             std::int64_t padded_inputs, int outputs, float* y, std::int64_t y_stride) {
  // Six rows are the most whose sums stay in registers. Up to six rows read the weights from memory
  // in one pass, which the processor's prefetcher follows at full speed; prefetching single lines
  // would be slower. With seven and eight rows, arithmetic takes as long as memory on one core: two
  // groups take turns after every few lines, so that neither waits for the other. Arithmetic limits
  // the speed of more rows. Fewer turns are then better, as long as the next group still finds the
  // weights in the second-level cache.
  constexpr std::int64_t step_bytes = block_outputs * step_inputs<Value> * sizeof(Value);
  const std::int64_t steps = padded_inputs / step_inputs<Value>;
  const int group = n_rows <= 8 ? 8 : 6;
  const std::int64_t slice = n_rows <= 8 ? steps : (256 << 10) / step_bytes;
  alignas(64) float sums[packed_product_rows * block_outputs];
  std::fill_n(sums, n_rows * block_outputs, 0.0f);
  for (std::int64_t begin = 0; begin < steps; begin += slice) {
    const std::int64_t end = std::min(steps, begin + slice);
    for (int m = 0; m < n_rows; m += group) {
      add_some(x + m * x_stride, x_stride, std::min(group, n_rows - m), block, begin, end,
               sums + m * block_outputs);
    }
  }
  for (int m = 0; m < n_rows; ++m) std::copy_n(sums + m * block_outputs, outputs, y + m * y_stride);
}

/// Transposes 16 x 16 words of 32 bits: target[j * target_stride + i] = source[i * source_stride +
/// j].
KVZAP_TARGET_AVX512 void transpose_16x16(const __m512i* rows, std::int32_t* target,
                                         std::int64_t target_stride) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
    a[i + 4] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
    a[i + 8] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_si512(target + i * target_stride, _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88));
    _mm512_storeu_si512(target + (i + 8) * target_stride,
                        _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd));
    _mm512_storeu_si512(target + (i + 4) * target_stride,
                        _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0x88));
    _mm512_storeu_si512(target + (i + 12) * target_stride,
                        _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0xdd));
  }
}

KVZAP_TARGET_AVX512 void widen_pairs(const bfloat16* block, std::int64_t padded_inputs,
                                     float* target) {
  for (std::int64_t k = 0; k < padded_inputs; k += 2) {
    for (int n = 0; n < block_outputs; n += width) {
      const __m512i pairs = _mm512_loadu_si512(block + k * block_outputs + 2 * n);
      float* const to = target + k * block_outputs + n;
      _mm512_storeu_ps(to, _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
      _mm512_storeu_ps(to + block_outputs,
                       _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-0x10000))));
    }
  }
}

/// Columns k .. k + 15 of 16-bit pairs or 32-bit values of a row, as 32-bit words, with zeros
/// behind `inputs`.
template <class Value>
KVZAP_TARGET_AVX512 inline __m512i load_words(const Value* row, std::int64_t k,
                                              std::int64_t inputs) {
  const std::int64_t valid = std::clamp<std::int64_t>(inputs - k, 0, 16 * step_inputs<Value>);
  if constexpr (sizeof(Value) == 4) {
    return _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << valid) - 1), row + k);
  } else {
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << valid) - 1), row + k);
  }
}

/// Transposes words of 32 bits: pairs of bf16, or floats.
template <class Value>
KVZAP_TARGET_AVX512 void pack_words(const Value* rows, std::int64_t stride, int n_rows,
                                    std::int64_t inputs, std::int64_t padded_inputs, Value* block) {
  auto* words = reinterpret_cast<std::int32_t*>(block);
  for (std::int64_t k = 0; k < padded_inputs; k += 16 * step_inputs<Value>) {
    for (int n = 0; n < block_outputs; n += 16) {
      __m512i source[16];
      for (int i = 0; i < 16; ++i) {
        source[i] = n + i < n_rows ? load_words(rows + (n + i) * stride, k, inputs)
                                   : _mm512_setzero_si512();
      }
      transpose_16x16(source, words + k / step_inputs<Value> * block_outputs + n, block_outputs);
    }
  }
}

}  // namespace

bool has_packed_kernels() { return true; }

void packed_product(const bfloat16* x, std::int64_t x_stride, int n_rows, const bfloat16* block,
                    std::int64_t padded_inputs, int outputs, float* y, std::int64_t y_stride) {
  product(x, x_stride, n_rows, block, padded_inputs, outputs, y, y_stride);
}
#define KVZAP_PACKED_PRODUCT(Value)                                                               \
  void packed_product(const float* x, std::int64_t x_stride, int n_rows, const Value* block,      \
                      std::int64_t padded_inputs, int outputs, float* y, std::int64_t y_stride) { \
    if (base::machine().simd() == base::SimdLevel::avx2) {                                        \
      return avx2::packed_product(x, x_stride, n_rows, block, padded_inputs, outputs, y,          \
                                  y_stride);                                                      \
    }                                                                                             \
    product(x, x_stride, n_rows, block, padded_inputs, outputs, y, y_stride);                     \
  }
KVZAP_PACKED_PRODUCT(float)
KVZAP_PACKED_PRODUCT(half)
KVZAP_PACKED_PRODUCT(bfloat16)
#undef KVZAP_PACKED_PRODUCT

// Value is a type. NOLINTBEGIN(bugprone-macro-parentheses)
#define KVZAP_PACK_BLOCK(Value)                                                            \
  void pack_block(const Value* rows, std::int64_t stride, int n_rows, std::int64_t inputs, \
                  std::int64_t padded_inputs, Value* block) {                              \
    if (base::machine().simd() == base::SimdLevel::avx2) {                                 \
      return avx2::pack_block(rows, stride, n_rows, inputs, padded_inputs, block);         \
    }                                                                                      \
    pack_words(rows, stride, n_rows, inputs, padded_inputs, block);                        \
  }
KVZAP_PACK_BLOCK(bfloat16)
KVZAP_PACK_BLOCK(float)
#undef KVZAP_PACK_BLOCK
// NOLINTEND(bugprone-macro-parentheses)
void pack_block(const half* rows, std::int64_t stride, int n_rows, std::int64_t inputs,
                std::int64_t padded_inputs, half* block) {
  // A plain transposition suffices for the load. Its tiles stay in the first-level cache.
  for (std::int64_t begin = 0; begin < padded_inputs; begin += 32) {
    const std::int64_t end = std::min(padded_inputs, begin + 32);
    for (int n = 0; n < block_outputs; ++n) {
      for (std::int64_t k = begin; k < end; ++k) {
        block[k * block_outputs + n] = n < n_rows && k < inputs ? rows[n * stride + k] : half{0};
      }
    }
  }
}

KVZAP_TARGET_AVX512 void pair_block(const half* block, std::int64_t padded_inputs,
                                    std::int64_t paired_inputs, half* target) {
  const __m512i halves =
      _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                       37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high_halves = _mm512_add_epi16(halves, _mm512_set1_epi16(16));
  for (std::int64_t k = 0; k < padded_inputs; k += 2, block += 2 * block_outputs) {
    for (int n = 0; n < block_outputs; n += 32, target += 64) {
      const __m512i even = _mm512_loadu_si512(block + n);
      const __m512i odd = _mm512_loadu_si512(block + block_outputs + n);
      _mm512_storeu_si512(target, _mm512_permutex2var_epi16(even, halves, odd));
      _mm512_storeu_si512(target + 32, _mm512_permutex2var_epi16(even, high_halves, odd));
    }
  }
  std::fill_n(target, (paired_inputs - padded_inputs) * block_outputs, half{0});
}

KVZAP_TARGET_AVX512 float scale_to_half(const float* source, std::int64_t count, half* target) {
  const auto lanes = [](std::int64_t left) {
    return static_cast<__mmask16>(left >= 16 ? 0xffffu : (1u << left) - 1);
  };
  const __m512 infinite = _mm512_set1_ps(__builtin_inff());
  __m512 most = _mm512_setzero_ps();
  for (std::int64_t i = 0; i < count; i += 16) {
    const __m512 x = _mm512_abs_ps(_mm512_maskz_loadu_ps(lanes(count - i), source + i));
    most = _mm512_mask_max_ps(most, _mm512_cmp_ps_mask(x, infinite, _CMP_LT_OQ), most, x);
  }
  const int shift = half_shift(_mm512_reduce_max_ps(most));
  const __m512 factor = _mm512_set1_ps(power_of_two(shift));
  for (std::int64_t i = 0; i < count; i += 16) {
    const __mmask16 mask = lanes(count - i);
    const __m512 x = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, source + i), factor);
    _mm256_mask_storeu_epi16(target + i, mask,
                             _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  return power_of_two(-shift);
}

void widen_block(const half* block, std::int64_t padded_inputs, float* target) {
  widen(block, target, padded_inputs * block_outputs);
}
void widen_block(const bfloat16* block, std::int64_t padded_inputs, float* target) {
  widen_pairs(block, padded_inputs, target);
}

#else

bool has_packed_kernels() { return false; }
void packed_product(const bfloat16*, std::int64_t, int, const bfloat16*, std::int64_t, int, float*,
                    std::int64_t) {}
void packed_product(const float*, std::int64_t, int, const float*, std::int64_t, int, float*,
                    std::int64_t) {}
void packed_product(const float*, std::int64_t, int, const half*, std::int64_t, int, float*,
                    std::int64_t) {}
void packed_product(const float*, std::int64_t, int, const bfloat16*, std::int64_t, int, float*,
                    std::int64_t) {}
void widen_block(const bfloat16*, std::int64_t, float*) {}
void pair_block(const half*, std::int64_t, std::int64_t, half*) {}
float scale_to_half(const float*, std::int64_t, half*) { return 1; }
void widen_block(const half*, std::int64_t, float*) {}
void pack_block(const bfloat16*, std::int64_t, int, std::int64_t, std::int64_t, bfloat16*) {}
void pack_block(const float*, std::int64_t, int, std::int64_t, std::int64_t, float*) {}
void pack_block(const half*, std::int64_t, int, std::int64_t, std::int64_t, half*) {}

#endif

}  // namespace kvzap::linalg

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
