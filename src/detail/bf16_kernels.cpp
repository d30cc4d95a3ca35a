#include "detail/bf16_kernels.hpp"

#include <algorithm>
#include <cstring>

#include "detail/simd.hpp"

#if KVZAP_X86
#include <immintrin.h>
#endif

// Within a block of rows that a kernel works on, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace kvzap::detail {

#if KVZAP_X86
namespace {

KVZAP_TARGET_AVX512_BF16 inline __m512bh load_bf16(const bfloat16* p) {
  return (__m512bh)_mm512_loadu_si512(p);
}

KVZAP_TARGET_AVX512_BF16 inline __m512bh load_bf16(const bfloat16* p, std::int64_t count) {
  return (__m512bh)_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << count) - 1), p);
}

/// One output of Rows rows. Weights are walked row by row: several rows at once would be several
/// streams in one memory page, which the processor's prefetcher does not follow.
template <int Rows>
KVZAP_TARGET_AVX512_BF16 void product_rows(const bfloat16* x, std::int64_t x_stride,
                                           const bfloat16* weights, std::int64_t weights_stride,
                                           std::int64_t outputs, std::int64_t inputs, float* y,
                                           std::int64_t y_stride) {
  // Independent sums hide the latency of the dot product; with several rows there are enough.
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

/// 64 outputs of Rows rows over the input pairs begin .. end, added to `sums` (Rows, 64).
template <int Rows>
KVZAP_TARGET_AVX512_BF16 void packed_tile(const bfloat16* x, std::int64_t x_stride,
                                          const bfloat16* block, std::int64_t begin,
                                          std::int64_t end, float* sums) {
  __m512 acc[Rows][4];
  for (int m = 0; m < Rows; ++m) {
    for (int j = 0; j < 4; ++j) acc[m][j] = _mm512_load_ps(sums + m * 64 + j * 16);
  }
  for (std::int64_t pair = begin; pair < end; ++pair) {
    __m512bh w[4];
    for (int j = 0; j < 4; ++j) w[j] = load_bf16(block + pair * 128 + j * 32);
    for (int m = 0; m < Rows; ++m) {
      std::int32_t both;
      std::memcpy(&both, x + m * x_stride + 2 * pair, sizeof(both));
      const __m512bh broadcast = (__m512bh)_mm512_set1_epi32(both);
      for (int j = 0; j < 4; ++j) acc[m][j] = _mm512_dpbf16_ps(acc[m][j], w[j], broadcast);
    }
  }
  for (int m = 0; m < Rows; ++m) {
    for (int j = 0; j < 4; ++j) _mm512_store_ps(sums + m * 64 + j * 16, acc[m][j]);
  }
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

KVZAP_TARGET_AVX512 void pack_block(const bfloat16* rows, std::int64_t stride, int n_rows,
                                    std::int64_t inputs, std::int64_t padded_inputs,
                                    bfloat16* block) {
  auto* words = reinterpret_cast<std::int32_t*>(block);
  for (std::int64_t k = 0; k < padded_inputs; k += 32) {
    const std::int64_t valid = std::clamp<std::int64_t>(inputs - k, 0, 32);
    const auto mask = static_cast<__mmask32>((1ull << valid) - 1);
    for (int n = 0; n < 64; n += 16) {
      __m512i source[16];
      for (int i = 0; i < 16; ++i) {
        source[i] = n + i < n_rows ? _mm512_maskz_loadu_epi16(mask, rows + (n + i) * stride + k)
                                   : _mm512_setzero_si512();
      }
      transpose_16x16(source, words + k / 2 * 64 + n, 64);
    }
  }
}

}  // namespace

bool has_bf16_kernels() { return true; }

void bf16_product_rows(const bfloat16* x, std::int64_t x_stride, int n_rows,
                       const bfloat16* weights, std::int64_t weights_stride, std::int64_t outputs,
                       std::int64_t inputs, float* y, std::int64_t y_stride) {
  const auto run = [&](auto product) {
    product(x, x_stride, weights, weights_stride, outputs, inputs, y, y_stride);
  };
  switch (n_rows) {
    case 1:
      return run(product_rows<1>);
    case 2:
      return run(product_rows<2>);
    case 3:
      return run(product_rows<3>);
    case 4:
      return run(product_rows<4>);
    case 5:
      return run(product_rows<5>);
    case 6:
      return run(product_rows<6>);
    case 7:
      return run(product_rows<7>);
    case 8:
      return run(product_rows<8>);
  }
}

void bf16_product_packed(const bfloat16* x, std::int64_t x_stride, int n_rows,
                         const bfloat16* block, std::int64_t padded_inputs, int outputs, float* y,
                         std::int64_t y_stride) {
  // Six rows are the most whose sums stay in registers. The first six take the weights in one
  // uninterrupted pass from memory, which the processor's prefetcher follows at full speed (asking
  // for lines one by one would not reach it); further rows find them in the second-level cache.
  constexpr int group = 6;
  constexpr std::int64_t chunk_pairs = 1024;  // 256 KiB
  alignas(64) float sums[16 * 64] = {};
  const std::int64_t pairs = padded_inputs / 2;
  for (std::int64_t begin = 0; begin < pairs; begin += chunk_pairs) {
    const std::int64_t end = std::min(pairs, begin + chunk_pairs);
    for (int m = 0; m < n_rows; m += group) {
      const auto run = [&](auto tile) {
        tile(x + m * x_stride, x_stride, block, begin, end, sums + m * 64);
      };
      switch (std::min(group, n_rows - m)) {
        case 1:
          run(packed_tile<1>);
          break;
        case 2:
          run(packed_tile<2>);
          break;
        case 3:
          run(packed_tile<3>);
          break;
        case 4:
          run(packed_tile<4>);
          break;
        case 5:
          run(packed_tile<5>);
          break;
        default:
          run(packed_tile<6>);
      }
    }
  }
  for (int m = 0; m < n_rows; ++m) std::copy_n(sums + m * 64, outputs, y + m * y_stride);
}

void bf16_pack_block(const bfloat16* rows, std::int64_t stride, int n_rows, std::int64_t inputs,
                     std::int64_t padded_inputs, bfloat16* block) {
  pack_block(rows, stride, n_rows, inputs, padded_inputs, block);
}

#else

bool has_bf16_kernels() { return false; }
void bf16_product_rows(const bfloat16*, std::int64_t, int, const bfloat16*, std::int64_t,
                       std::int64_t, std::int64_t, float*, std::int64_t) {}
void bf16_product_packed(const bfloat16*, std::int64_t, int, const bfloat16*, std::int64_t, int,
                         float*, std::int64_t) {}
void bf16_pack_block(const bfloat16*, std::int64_t, int, std::int64_t, std::int64_t, bfloat16*) {}

#endif

}  // namespace kvzap::detail

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
