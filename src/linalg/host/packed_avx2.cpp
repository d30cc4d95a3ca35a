#include "linalg/host/packed_avx2.hpp"

#include <algorithm>
#include <cstring>

#include "base/simd.hpp"
#include "linalg/host/packed_kernels.hpp"
#include "linalg/linear_weights.hpp"

#if KVZAP_X86
#include <immintrin.h>
#endif

// Within a block of rows that a kernel works on, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace kvzap::linalg::avx2 {

#if KVZAP_X86
#define KVZAP_INLINE_AVX2 KVZAP_TARGET_AVX2 inline __attribute__((always_inline))
// For loops over registers. Without it, GCC unrolls them late and stores all sums in every step.
#define KVZAP_UNROLL _Pragma("GCC unroll 16")

namespace {

constexpr int block_outputs = LinearWeights::block_outputs;
constexpr int width = 8;

// Inputs that a block stores together for all outputs: two in bf16, one in other types.
template <class Value>
constexpr int step_inputs = std::is_same_v<Value, bfloat16> ? 2 : 1;

// Input number I of one step for eight outputs, widened.
template <int I>
KVZAP_INLINE_AVX2 __m256 load(const float* p) {
  return _mm256_loadu_ps(p);
}
template <int I>
KVZAP_INLINE_AVX2 __m256 load(const half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
template <int I>
KVZAP_INLINE_AVX2 __m256 load(const bfloat16* p) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_castsi256_ps(I == 0 ? _mm256_slli_epi32(pairs, 16)
                                    : _mm256_and_si256(pairs, _mm256_set1_epi32(-0x10000)));
}

/// acc (Rows, 8 * Vectors) += x (Rows) * weights (8 * Vectors) for input number I of a step. `x`
/// points to that input of the first row.
template <int I, int Rows, int Vectors, class Value>
KVZAP_INLINE_AVX2 void add_input(const float* x, std::int64_t x_stride, const Value* step,
                                 __m256 (&acc)[Rows][Vectors]) {
  constexpr int apart = width * step_inputs<Value>;
  // The smaller of the two operands stays in registers beside the sums.
  if constexpr (Rows <= 3) {
    __m256 row[Rows];
    KVZAP_UNROLL for (int m = 0; m < Rows; ++m) row[m] = _mm256_broadcast_ss(x + m * x_stride);
    KVZAP_UNROLL for (int j = 0; j < Vectors; ++j) {
      const __m256 w = load<I>(step + j * apart);
      KVZAP_UNROLL for (int m = 0; m < Rows; ++m) acc[m][j] = _mm256_fmadd_ps(w, row[m], acc[m][j]);
    }
  } else {
    __m256 w[Vectors];
    KVZAP_UNROLL for (int j = 0; j < Vectors; ++j) w[j] = load<I>(step + j * apart);
    KVZAP_UNROLL for (int m = 0; m < Rows; ++m) {
      const __m256 row = _mm256_broadcast_ss(x + m * x_stride);
      KVZAP_UNROLL for (int j = 0; j < Vectors; ++j) {
        acc[m][j] = _mm256_fmadd_ps(w[j], row, acc[m][j]);
      }
    }
  }
}

/// Adds the outputs first .. first + 8 * Vectors - 1 of a block, for Rows rows over the steps begin
/// .. end - 1, to `sums` (Rows, 64).
template <int Rows, int Vectors, class Value>
KVZAP_INLINE_AVX2 void add_steps(const float* x, std::int64_t x_stride, const Value* block,
                                 int first, std::int64_t begin, std::int64_t end, float* sums) {
  constexpr int together = step_inputs<Value>;
  __m256 acc[Rows][Vectors];
  KVZAP_UNROLL for (int m = 0; m < Rows; ++m) {
    KVZAP_UNROLL for (int j = 0; j < Vectors; ++j) {
      acc[m][j] = _mm256_load_ps(sums + m * block_outputs + first + j * width);
    }
  }
  for (std::int64_t k = begin; k < end; ++k) {
    const Value* step = block + (k * block_outputs + first) * together;
    add_input<0>(x + k * together, x_stride, step, acc);
    if constexpr (together == 2) add_input<1>(x + k * together + 1, x_stride, step, acc);
  }
  KVZAP_UNROLL for (int m = 0; m < Rows; ++m) {
    KVZAP_UNROLL for (int j = 0; j < Vectors; ++j) {
      _mm256_store_ps(sums + m * block_outputs + first + j * width, acc[m][j]);
    }
  }
}

/// All outputs, in groups whose sums fit in sixteen registers. (If this were inlined where the
/// number of steps is known, GCC would unroll the loop and run out of registers for addresses.)
template <int Rows, class Value>
KVZAP_TARGET_AVX2 __attribute__((noinline)) void add_all(const float* x, std::int64_t x_stride,
                                                         const Value* block, std::int64_t begin,
                                                         std::int64_t end, float* sums) {
  constexpr int vectors = Rows == 1 ? 8 : Rows <= 3 ? 4 : 2;
  for (int first = 0; first < block_outputs; first += vectors * width) {
    add_steps<Rows, vectors>(x, x_stride, block, first, begin, end, sums);
  }
}

/// For rows that read the weights directly from memory. Parts of a block take turns after every
/// KiB, so that lines are read nearly in memory order. The processor's prefetcher then reaches full
/// speed; prefetching single lines would not.
template <int Rows, class Value>
KVZAP_TARGET_AVX2 void stream(const float* x, std::int64_t x_stride, const Value* block,
                              std::int64_t steps, float* sums) {
  constexpr std::int64_t step_bytes = block_outputs * step_inputs<Value> * sizeof(Value);
  const std::int64_t turn = Rows == 1 ? steps : 1024 / step_bytes;  // padding makes it a divisor
  for (std::int64_t begin = 0; begin < steps; begin += turn) {
    add_all<Rows>(x, x_stride, block, begin, begin + turn, sums);
  }
}

// With more rows, weights are first widened into the first-level cache, this many inputs at a time,
// and shared.
constexpr std::int64_t widened_inputs = 32;

/// Widens all 64 outputs of `count` <= widened_inputs inputs, input after input.
template <class Value>
KVZAP_TARGET_AVX2 void widen_inputs(const Value* source, std::int64_t count, float* wide) {
  constexpr int together = step_inputs<Value>;
  for (std::int64_t k = 0; k < count; k += together) {
    for (int j = 0; j < block_outputs; j += width) {
      const Value* step = source + k * block_outputs + j * together;
      float* to = wide + k * block_outputs + j;
      _mm256_store_ps(to, load<0>(step));
      if constexpr (together == 2) _mm256_store_ps(to + block_outputs, load<1>(step));
    }
  }
}

template <int Rows>
KVZAP_TARGET_AVX2 void add_widened(const float* x, std::int64_t x_stride, const float* wide,
                                   int first, std::int64_t count, float* sums) {
  add_steps<Rows, 2>(x, x_stride, wide, first, 0, count, sums);
}

template <class Value>
KVZAP_TARGET_AVX2 void share(const float* x, std::int64_t x_stride, int n_rows, const Value* block,
                             std::int64_t padded_inputs, float* sums) {
  constexpr int most = 6;  // rows whose sums of 16 outputs stay in registers
  constexpr std::int64_t line = 64 / sizeof(Value);
  const int groups = (n_rows + most - 1) / most;
  alignas(64) float wide[widened_inputs * block_outputs];
  for (std::int64_t begin = 0; begin < padded_inputs; begin += widened_inputs) {
    const std::int64_t count = std::min(widened_inputs, padded_inputs - begin);
    const Value* source = block + begin * block_outputs;
    widen_inputs(source, count, wide);
    // Prefetches to the second-level cache, far enough ahead. Lines behind the last block are not
    // read.
    const Value* next = source + 2 * widened_inputs * block_outputs;
    for (int first = 0; first < block_outputs; first += 2 * width) {
      for (std::int64_t i = 0; i < widened_inputs * 2 * width; i += line) {
        __builtin_prefetch(reinterpret_cast<const char*>(next + first * widened_inputs + i), 0, 2);
      }
      for (int g = 0; g < groups; ++g) {
        const int m = g * n_rows / groups;
        const float* rows = x + m * x_stride + begin;
        float* rows_sums = sums + m * block_outputs;
        switch ((g + 1) * n_rows / groups - m) {
          case 3:
            add_widened<3>(rows, x_stride, wide, first, count, rows_sums);
            break;
          case 4:
            add_widened<4>(rows, x_stride, wide, first, count, rows_sums);
            break;
          case 5:
            add_widened<5>(rows, x_stride, wide, first, count, rows_sums);
            break;
          case 6:
            add_widened<6>(rows, x_stride, wide, first, count, rows_sums);
            break;
        }
      }
    }
  }
}

template <class Value>
void product(const float* x, std::int64_t x_stride, int n_rows, const Value* block,
             std::int64_t padded_inputs, int outputs, float* y, std::int64_t y_stride) {
  const std::int64_t steps = padded_inputs / step_inputs<Value>;
  alignas(64) float sums[packed_product_rows * block_outputs];
  std::fill_n(sums, n_rows * block_outputs, 0.0f);
  // Six rows are the most whose sums of 16 outputs stay in registers. With floats, five rows
  // already gain from the other path, which reads the weights in one stream.
  constexpr int most_streamed = std::is_same_v<Value, float> ? 4 : 6;
  switch (n_rows <= most_streamed ? n_rows : 0) {
    case 1:
      stream<1>(x, x_stride, block, steps, sums);
      break;
    case 2:
      stream<2>(x, x_stride, block, steps, sums);
      break;
    case 3:
      stream<3>(x, x_stride, block, steps, sums);
      break;
    case 4:
      stream<4>(x, x_stride, block, steps, sums);
      break;
    case 5:
      stream<5>(x, x_stride, block, steps, sums);
      break;
    case 6:
      stream<6>(x, x_stride, block, steps, sums);
      break;
    default:
      share(x, x_stride, n_rows, block, padded_inputs, sums);
  }
  for (int m = 0; m < n_rows; ++m) std::copy_n(sums + m * block_outputs, outputs, y + m * y_stride);
}

// A product of many rows: panels of 16 outputs by gemm_inputs inputs are widened into the
// first-level cache, and all rows are multiplied by them, six at a time.
constexpr int tile_rows = 6;
constexpr int tile_outputs = 16;

/// Widens the inputs begin .. end - 1 of 16 outputs; begin and end are multiples of a step.
template <class Value>
KVZAP_TARGET_AVX2 void widen_panel(const Value* block, int first, std::int64_t begin,
                                   std::int64_t end, float* panel) {
  constexpr int together = step_inputs<Value>;
  for (std::int64_t k = begin; k < end; k += together) {
    const Value* step = block + k * block_outputs + first * together;
    for (int j = 0; j < tile_outputs; j += width) {
      float* to = panel + (k - begin) * tile_outputs + j;
      _mm256_store_ps(to, load<0>(step + j * together));
      if constexpr (together == 2) _mm256_store_ps(to + tile_outputs, load<1>(step + j * together));
    }
  }
}

/// sums (Rows, 16) += x (Rows, count) * panel (count, 16), or = if `first`. Rows of x are
/// gemm_inputs apart. count is a multiple of 8. Prefetches the following rows meanwhile.
template <int Rows>
KVZAP_TARGET_AVX2 void multiply_tile(const float* x, const float* panel, std::int64_t count,
                                     bool first, float* sums) {
  constexpr int unrolled = 8, line = 16;
  __m256 acc[Rows][2];
  KVZAP_UNROLL for (int m = 0; m < Rows; ++m) {
    acc[m][0] = _mm256_setzero_ps();
    acc[m][1] = _mm256_setzero_ps();
  }
  const float* next = x + Rows * gemm_inputs;
  for (std::int64_t k = 0; k < count; k += unrolled) {
    KVZAP_UNROLL for (int i = 0; i < Rows * unrolled; i += line) {
      __builtin_prefetch(next + Rows * k + i, 0, 3);
    }
    KVZAP_UNROLL for (int i = 0; i < unrolled; ++i) {
      const __m256 low = _mm256_load_ps(panel + (k + i) * tile_outputs);
      const __m256 high = _mm256_load_ps(panel + (k + i) * tile_outputs + width);
      KVZAP_UNROLL for (int m = 0; m < Rows; ++m) {
        const __m256 row = _mm256_broadcast_ss(x + m * gemm_inputs + k + i);
        acc[m][0] = _mm256_fmadd_ps(low, row, acc[m][0]);
        acc[m][1] = _mm256_fmadd_ps(high, row, acc[m][1]);
      }
    }
  }
  KVZAP_UNROLL for (int m = 0; m < Rows; ++m) {
    float* to = sums + m * tile_outputs;
    if (!first) {
      acc[m][0] = _mm256_add_ps(acc[m][0], _mm256_load_ps(to));
      acc[m][1] = _mm256_add_ps(acc[m][1], _mm256_load_ps(to + width));
    }
    _mm256_store_ps(to, acc[m][0]);
    _mm256_store_ps(to + width, acc[m][1]);
  }
}

void multiply_rows(int n_rows, const float* x, const float* panel, std::int64_t count, bool first,
                   float* sums) {
  switch (n_rows) {
    case 1:
      return multiply_tile<1>(x, panel, count, first, sums);
    case 2:
      return multiply_tile<2>(x, panel, count, first, sums);
    case 3:
      return multiply_tile<3>(x, panel, count, first, sums);
    case 4:
      return multiply_tile<4>(x, panel, count, first, sums);
    case 5:
      return multiply_tile<5>(x, panel, count, first, sums);
    case 6:
      return multiply_tile<6>(x, panel, count, first, sums);
  }
}

template <class Value>
void gemm(const float* x, std::int64_t slice_stride, std::int64_t n_rows, const Value* block,
          std::int64_t padded_inputs, int outputs, const float* bias, float* y,
          std::int64_t y_stride) {
  constexpr std::int64_t line = 64 / sizeof(Value);
  constexpr std::int64_t slice_values = gemm_inputs * block_outputs;
  alignas(64) float panel[gemm_inputs * tile_outputs];
  // Works panel by panel, because rows of y may contend for the same sets of the caches.
  alignas(64) float sums[gemm_rows * block_outputs];
  const std::int64_t panels = (outputs + tile_outputs - 1) / tile_outputs;
  // Tiles have equal numbers of rows, or one more: small tiles keep the multipliers waiting.
  const std::int64_t groups = (n_rows + tile_rows - 1) / tile_rows;
  const std::int64_t tiles = panels * groups;
  const std::int64_t asked_by_tile = (slice_values / line + tiles - 1) / tiles * line;
  for (std::int64_t begin = 0; begin < padded_inputs; begin += gemm_inputs) {
    const std::int64_t count = std::min(gemm_inputs, padded_inputs - begin);
    const float* slice = x + begin / gemm_inputs * slice_stride;
    // Prefetches the next slice of weights in memory order. (Behind the last slice lies the first
    // of the next block, or memory that is not read.)
    const Value* next = block + (begin + count) * block_outputs;
    for (std::int64_t p = 0; p < panels; ++p) {
      widen_panel(block, static_cast<int>(p) * tile_outputs, begin, begin + count, panel);
      for (std::int64_t g = 0; g < groups; ++g) {
        const std::int64_t m = g * n_rows / groups;
        for (std::int64_t i = 0; i < asked_by_tile; i += line) {
          __builtin_prefetch(reinterpret_cast<const char*>(next + i), 0, 2);
        }
        next += asked_by_tile;
        multiply_rows(static_cast<int>((g + 1) * n_rows / groups - m), slice + m * gemm_inputs,
                      panel, count, begin == 0, sums + (p * n_rows + m) * tile_outputs);
      }
    }
  }
  for (std::int64_t m = 0; m < n_rows; ++m) {
    for (int first = 0; first < outputs; first += tile_outputs) {
      const int valid = std::min(tile_outputs, outputs - first);
      const float* from = sums + (first / tile_outputs * n_rows + m) * tile_outputs;
      float* to = y + m * y_stride + first;
      for (int n = 0; n < valid; ++n) to[n] = from[n] + (bias ? bias[first + n] : 0.0f);
    }
  }
}

/// Transposes 8 x 8 words of 32 bits.
KVZAP_INLINE_AVX2 void transpose_8x8(const __m256i* rows, std::int32_t* target,
                                     std::int64_t target_stride) {
  __m256i a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + i * target_stride),
                        _mm256_permute2x128_si256(b[i], b[i + 4], 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + (i + 4) * target_stride),
                        _mm256_permute2x128_si256(b[i], b[i + 4], 0x31));
  }
}

template <class Value>
KVZAP_TARGET_AVX2 void pack_words(const Value* rows, std::int64_t stride, int n_rows,
                                  std::int64_t inputs, std::int64_t padded_inputs, Value* block) {
  constexpr std::int64_t taken = width * step_inputs<Value>;
  auto* words = reinterpret_cast<std::int32_t*>(block);
  for (std::int64_t k = 0; k < padded_inputs; k += taken) {
    const std::int64_t valid = std::clamp<std::int64_t>(inputs - k, 0, taken);
    for (int n = 0; n < block_outputs; n += width) {
      __m256i source[width];
      for (int i = 0; i < width; ++i) {
        source[i] = _mm256_setzero_si256();
        if (n + i >= n_rows || valid == 0) continue;
        const Value* row = rows + (n + i) * stride + k;
        if (valid < taken) {
          std::memcpy(&source[i], row, static_cast<std::size_t>(valid) * sizeof(Value));
        } else {
          source[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row));
        }
      }
      transpose_8x8(source, words + k / step_inputs<Value> * block_outputs + n, block_outputs);
    }
  }
}

}  // namespace

void pack_block(const bfloat16* rows, std::int64_t stride, int n_rows, std::int64_t inputs,
                std::int64_t padded_inputs, bfloat16* block) {
  pack_words(rows, stride, n_rows, inputs, padded_inputs, block);
}
void pack_block(const float* rows, std::int64_t stride, int n_rows, std::int64_t inputs,
                std::int64_t padded_inputs, float* block) {
  pack_words(rows, stride, n_rows, inputs, padded_inputs, block);
}

#undef KVZAP_INLINE_AVX2
#undef KVZAP_UNROLL

#else

namespace {
template <class Value>
void product(const float*, std::int64_t, int, const Value*, std::int64_t, int, float*,
             std::int64_t) {}
template <class Value>
void gemm(const float*, std::int64_t, std::int64_t, const Value*, std::int64_t, int, const float*,
          float*, std::int64_t) {}
}  // namespace

void pack_block(const bfloat16*, std::int64_t, int, std::int64_t, std::int64_t, bfloat16*) {}
void pack_block(const float*, std::int64_t, int, std::int64_t, std::int64_t, float*) {}

#endif

#define KVZAP_PACKED_AVX2(Value)                                                                   \
  void packed_product(const float* x, std::int64_t x_stride, int n_rows, const Value* block,       \
                      std::int64_t padded_inputs, int outputs, float* y, std::int64_t y_stride) {  \
    product(x, x_stride, n_rows, block, padded_inputs, outputs, y, y_stride);                      \
  }                                                                                                \
  void packed_gemm(const float* x, std::int64_t slice_stride, std::int64_t n_rows,                 \
                   const Value* block, std::int64_t padded_inputs, int outputs, const float* bias, \
                   float* y, std::int64_t y_stride) {                                              \
    gemm(x, slice_stride, n_rows, block, padded_inputs, outputs, bias, y, y_stride);               \
  }
KVZAP_PACKED_AVX2(bfloat16)
KVZAP_PACKED_AVX2(float)
KVZAP_PACKED_AVX2(half)
#undef KVZAP_PACKED_AVX2

}  // namespace kvzap::linalg::avx2

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
