#include "attention/host/amx_prefill.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "attention/call.hpp"
#include "attention/host/amx_formats.hpp"
#include "attention/host/tile_registers.hpp"
#include "attention/host/vector_math.hpp"
#include "base/simd.hpp"
#include "linalg/host/row_kernels.hpp"
#include "linalg/rounded_rows.hpp"

// Within a tile offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace kvzap::attention {
namespace {

// Query rows of a tile (tokens times group). With 128 dimensions and 512 keys, a tile of the larger
// size takes half a level-2 cache of 2 MiB. Packing the keys and values takes as long as one block
// of 32 rows. Spans of fewer rows than `many` have tiles of half the size.
constexpr std::int64_t tile_rows = 512;
constexpr std::int64_t many_rows = 4096;

// Rows of a block, and keys and dimensions of a step: two tiles each way.
constexpr int block = 32;

constexpr std::int64_t padded_tile(int group) {
  return whole(std::max<std::int64_t>(tile_rows, group), block);
}

}  // namespace

std::int64_t amx_least_tile_tokens(int group) {
  return std::max<std::int64_t>(1, tile_rows / 2 / group);
}

std::int64_t amx_tile_tokens(int group, std::int64_t span_tokens) {
  if (span_tokens * group < many_rows) return amx_least_tile_tokens(group);
  return std::max<std::int64_t>(1, tile_rows / group);
}

template <class Format>
bool AmxPrefill<Format>::available() {
  const base::SimdLevel level = base::machine().simd();
  if (!KVZAP_X86 || level < base::SimdLevel::amx_bf16_emulated) return false;
  const bool has_half =
      level == base::SimdLevel::amx_emulated || level == base::SimdLevel::amx_fp16;
  return std::is_same_v<Format, BfloatTiles> || has_half == std::is_same_v<Format, HalfTiles>;
}

template <class Format>
std::int64_t AmxPrefill<Format>::scratch_size(int group, int dim) {
  const std::int64_t rows = padded_tile(group);
  const std::int64_t padded = whole(dim, block);
  // Sizes in bytes, in the order of the constructor.
  constexpr std::int64_t size = Format::parts * 2;  // of a packed value
  const std::int64_t bytes = rows * padded * size + 2 * (tile_keys * padded * size) +
                             tile_keys * block * 4 + tile_keys * block * size + rows * padded * 4 +
                             rows * 64 + rows * 4 + (Format::scales_queries ? rows * 4 : 0) +
                             whole(2 * tile_keys * dim * 2, 64) + padded * 2;
  return bytes / static_cast<std::int64_t>(sizeof(float));
}

template <class Format>
AmxPrefill<Format>::AmxPrefill(int group, int dim, float* scratch, float soft_cap)
    : m_group(group),
      m_dim(dim),
      m_steps(static_cast<int>(whole(dim, block) / block)),
      m_emulated(base::machine().simd() < base::SimdLevel::amx_bf16),
      m_scaling(1.44269504f / std::sqrt(static_cast<float>(dim))),
      m_soft_cap(soft_cap) {
  const std::int64_t rows = padded_tile(group);
  const std::int64_t padded = whole(dim, block);
  char* at = reinterpret_cast<char*>(scratch);
  const auto take = [&](std::int64_t bytes) {
    char* const taken = at;
    at += whole(bytes, 64);
    return taken;
  };
  constexpr std::int64_t size = Format::parts * 2;
  m_queries = take(rows * padded * size);
  m_keys = take(tile_keys * padded * size);
  m_values = take(tile_keys * padded * size);
  m_scores = take(tile_keys * block * 4);
  m_weights = take(tile_keys * block * size);
  m_sums = reinterpret_cast<float*>(take(rows * padded * 4));
  m_totals = reinterpret_cast<float*>(take(rows * 64));
  m_shifts = reinterpret_cast<float*>(take(rows * 4));
  m_scalings = reinterpret_cast<float*>(take(Format::scales_queries ? rows * 4 : 0));
  m_copies = reinterpret_cast<Value*>(take(2 * tile_keys * dim * 2));
  m_zeros = reinterpret_cast<Value*>(take(padded * 2));
  std::fill_n(m_zeros, padded, Value());
}

template <class Format>
float* AmxPrefill<Format>::sums_of(std::int64_t row, int column_block) const {
  const std::int64_t tile = (row / block * m_steps + column_block / 2) * 4 + row / 16 % 2 * 2;
  return m_sums + (tile + column_block % 2) * 256 + row % 16 * 16;
}

/// Returns the keys of the staged tile that a row sees.
template <class Format>
int AmxPrefill<Format>::limit_of(std::int64_t row) const {
  return static_cast<int>(std::clamp<std::int64_t>(m_visible + row / m_group, 0, m_staged));
}

template <class Format>
float AmxPrefill<Format>::total_of(std::int64_t row) const {
  float total = 0;
  for (int i = 0; i < 16; ++i) total += m_totals[row * 16 + i];
  return total;
}

template <class Format>
void AmxPrefill<Format>::copy_sums(std::int64_t row, float factor, float* target,
                                   std::int64_t dim_stride) const {
  for (int c = 0; c * 16 < m_dim; ++c) {
    const float* const sums = sums_of(row, c);
    const int count = std::min(16, m_dim - c * 16);
    float* const columns = target + c * 16 * dim_stride;
    if (m_first) {
      for (int i = 0; i < count; ++i) columns[i * dim_stride] = 0;
    } else if (count == 16 && dim_stride == 1) {
      for (int i = 0; i < 16; ++i) columns[i] = sums[i] * factor;
    } else {
      for (int i = 0; i < count; ++i) columns[i * dim_stride] = sums[i] * factor;
    }
  }
}

#if KVZAP_X86
/// The part that is compiled for the instruction set.
///
/// Weights are 2^(scaling score - shift). The first shift of a row is its largest score with the
/// first 32 keys, less `headroom`. It is raised only where weights exceed `large`. Float and
/// bfloat16 have enough exponents, so no maximum of later scores is needed. Half has few. The
/// largest score starts at 2^6, which leaves most of its range below. Any weight is far from
/// overflow while 16 sums of weights are at most 2^15. (A weight that overflows makes its sum
/// infinite.)
template <class Format>
template <class Tiles>
struct AmxPrefill<Format>::Kernels {
  using By = AmxFormat<Format>;
  static constexpr int parts = Format::parts;
  // Elements of 32 rows, keys or columns and a step of 32: both halves of all parts.
  static constexpr int part_bytes = 2 * tile_bytes;
  static constexpr int step_bytes = parts * part_bytes;

  // Tile registers: 0 .. 3 sums [row half][column half], 4 and 5 rows, 6 and 7 columns. `both`:
  // there are more than 16 rows; otherwise the second row half is skipped.

  template <bool both>
  KVZAP_INLINE_AVX512_BF16 void zero() {
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    if (both) {
      Tiles::template zero<2>();
      Tiles::template zero<3>();
    }
  }

  template <bool both>
  KVZAP_INLINE_AVX512_BF16 void load(const char* source) {
    Tiles::template load<0>(source);
    Tiles::template load<1>(source + tile_bytes);
    if (both) {
      Tiles::template load<2>(source + 2 * tile_bytes);
      Tiles::template load<3>(source + 3 * tile_bytes);
    }
  }

  template <bool both>
  KVZAP_INLINE_AVX512_BF16 void store(char* target) {
    Tiles::template store<0>(target);
    Tiles::template store<1>(target + tile_bytes);
    if (both) {
      Tiles::template store<2>(target + 2 * tile_bytes);
      Tiles::template store<3>(target + 3 * tile_bytes);
    }
  }

  /// sums += two tiles at a (rows) times two at b (columns). once: b is not read again soon.
  /// loads_a, loads_b: false if the registers still hold them.
  template <bool both, bool once, bool loads_a = true, bool loads_b = true>
  KVZAP_INLINE_AVX512_BF16 void multiply(const char* a, const char* b) {
    if (loads_b) load_column<6, once>(b);
    if (loads_a) Tiles::template load<4>(a);
    By::template multiply<Tiles, 0, 4, 6>();
    if (loads_b) load_column<7, once>(b + tile_bytes);
    By::template multiply<Tiles, 1, 4, 7>();
    if (both) {
      if (loads_a) Tiles::template load<5>(a + tile_bytes);
      By::template multiply<Tiles, 2, 5, 6>();
      By::template multiply<Tiles, 3, 5, 7>();
    }
  }

  template <int tile, bool once>
  KVZAP_INLINE_AVX512_BF16 void load_column(const char* source) {
    if (once) {
      Tiles::template load_once<tile>(source);
    } else {
      Tiles::template load<tile>(source);
    }
  }

  /// The same for all parts, small products first.
  template <bool both, bool once>
  KVZAP_INLINE_AVX512_BF16 void multiply_parts(const char* a, const char* b) {
    if constexpr (parts == 1) {
      multiply<both, once>(a, b);
    } else {
      multiply<both, once>(a + part_bytes, b);
      multiply<both, once, true, false>(a, b);
      multiply<both, once, false, true>(a, b + part_bytes);
    }
  }

  KVZAP_INLINE_AVX512_BF16 void store_parts(const __m512i* values, char* target) {
#pragma GCC unroll 2
    for (int p = 0; p < parts; ++p) _mm512_store_si512(target + p * part_bytes, values[p]);
  }

  KVZAP_INLINE_AVX512_BF16 std::uint32_t first_lanes(std::int64_t count) {
    return count >= 32 ? ~0u : count <= 0 ? 0u : (1u << count) - 1;
  }
  KVZAP_INLINE_AVX512_BF16 __mmask16 low(std::uint32_t lanes) {
    return static_cast<__mmask16>(lanes & 0xffffu);
  }
  KVZAP_INLINE_AVX512_BF16 __mmask16 high(std::uint32_t lanes) {
    return static_cast<__mmask16>(lanes >> 16);
  }

  /// target[j][i] = source[i][j], 16 x 16 words.
  KVZAP_INLINE_AVX512_BF16 void transpose_words(const __m512i* source, char* target) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
      b[i] = _mm512_unpacklo_epi32(source[i], source[i + 1]);
      b[i + 1] = _mm512_unpackhi_epi32(source[i], source[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        a[i + 2 * h] = _mm512_unpacklo_epi64(b[i + h], b[i + 2 + h]);
        a[i + 2 * h + 1] = _mm512_unpackhi_epi64(b[i + h], b[i + 2 + h]);
      }
    }
    // a[4 g + k], 128-bit lane l: words 4 l + k of rows 4 g .. 4 g + 3.
#pragma GCC unroll 16
    for (int k = 0; k < 4; ++k) {
      const __m512i even = _mm512_shuffle_i32x4(a[k], a[4 + k], 0x88);
      const __m512i even_high = _mm512_shuffle_i32x4(a[8 + k], a[12 + k], 0x88);
      const __m512i odd = _mm512_shuffle_i32x4(a[k], a[4 + k], 0xdd);
      const __m512i odd_high = _mm512_shuffle_i32x4(a[8 + k], a[12 + k], 0xdd);
      char* const t = target + 64 * k;
      _mm512_store_si512(t, _mm512_shuffle_i32x4(even, even_high, 0x88));
      _mm512_store_si512(t + 4 * 64, _mm512_shuffle_i32x4(odd, odd_high, 0x88));
      _mm512_store_si512(t + 8 * 64, _mm512_shuffle_i32x4(even, even_high, 0xdd));
      _mm512_store_si512(t + 12 * 64, _mm512_shuffle_i32x4(odd, odd_high, 0xdd));
    }
  }

  KVZAP_TARGET_AVX512_BF16 static void round_query(AmxPrefill& x, std::int64_t row,
                                                   const float* source) {
    __m512 factor = _mm512_set1_ps(1);
    if constexpr (Format::scales_queries) {
      const int shift = linalg::half_shift(largest_finite(source, x.m_dim));
      factor = _mm512_set1_ps(linalg::power_of_two(shift));
      x.m_scalings[row] = x.m_scaling * linalg::power_of_two(-shift);
    }
    for (int s = 0; s < x.m_steps; ++s) {
      const std::uint32_t lanes = first_lanes(x.m_dim - s * block);
      __m512 first = _mm512_maskz_loadu_ps(low(lanes), source + s * block);
      __m512 second = _mm512_maskz_loadu_ps(high(lanes), source + s * block + 16);
      if constexpr (Format::scales_queries) {
        first = _mm512_mul_ps(first, factor);
        second = _mm512_mul_ps(second, factor);
      }
      __m512i rounded[parts];
      By::round(first, second, rounded);
      store_parts(rounded,
                  x.m_queries + (row / block * x.m_steps + s) * step_bytes + row % block * 64);
    }
  }

  /// Returns the largest finite magnitude; 0 if there is none.
  KVZAP_INLINE_AVX512_BF16 float largest_finite(const float* values, int count) {
    const __m512 infinite = _mm512_set1_ps(-minus_infinity);
    __m512 most = _mm512_setzero_ps();
    for (int i = 0; i < count; i += 16) {
      const __m512 x =
          _mm512_abs_ps(_mm512_maskz_loadu_ps(low(first_lanes(count - i)), values + i));
      most = _mm512_mask_max_ps(most, _mm512_cmp_ps_mask(x, infinite, _CMP_LT_OQ), most, x);
    }
    return _mm512_reduce_max_ps(most);
  }

  /// Packs the staged rows into tiles, with zeros up to a whole number of blocks.
  KVZAP_TARGET_AVX512_BF16 static void pack(AmxPrefill& x) {
    const int padded = static_cast<int>(whole(x.m_staged, block));
    for (int i = x.m_staged; i < padded; ++i) x.m_key_rows[i] = x.m_value_rows[i] = x.m_zeros;
    const int steps = x.m_steps;
    for (int k = 0; k < padded; k += 16) {
      for (int s = 0; s < steps; ++s) {
        const std::uint32_t lanes = first_lanes(x.m_dim - s * block);
        __m512i rows[parts][16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
          __m512i values[parts];
          By::take_apart(_mm512_maskz_loadu_epi16(lanes, x.m_key_rows[k + i] + s * block), values);
          for (int p = 0; p < parts; ++p) rows[p][i] = values[p];
        }
        for (int p = 0; p < parts; ++p) {
          transpose_words(rows[p], x.m_keys + (k / block * steps + s) * step_bytes +
                                       p * part_bytes + k / 16 % 2 * tile_bytes);
        }
      }
    }
    const __m512i halves =
        _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                         37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high_halves = _mm512_add_epi16(halves, _mm512_set1_epi16(16));
    for (int k = 0; k < padded; k += 2) {
      for (int s = 0; s < steps; ++s) {
        const std::uint32_t lanes = first_lanes(x.m_dim - s * block);
        __m512i even[parts], odd[parts];
        By::take_apart(_mm512_maskz_loadu_epi16(lanes, x.m_value_rows[k] + s * block), even);
        By::take_apart(_mm512_maskz_loadu_epi16(lanes, x.m_value_rows[k + 1] + s * block), odd);
        char* target =
            x.m_values + (s * (tile_keys / block) + k / block) * step_bytes + k % block / 2 * 64;
        for (int p = 0; p < parts; ++p, target += part_bytes) {
          _mm512_store_si512(target, _mm512_permutex2var_epi16(even[p], halves, odd[p]));
          _mm512_store_si512(target + tile_bytes,
                             _mm512_permutex2var_epi16(even[p], high_halves, odd[p]));
        }
      }
    }
  }

  KVZAP_INLINE_AVX512_BF16 bool is_finite(const Value* row, int dim) {
    const __m512i exponent = _mm512_set1_epi16(std::is_same_v<Value, half> ? 0x7c00 : 0x7f80);
    __mmask32 found = 0;
    for (int d = 0; d < dim; d += 32) {
      const __m512i words = _mm512_maskz_loadu_epi16(first_lanes(dim - d), row + d);
      found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(words, exponent), exponent);
    }
    return found == 0;
  }

  /// Computes scores of the rows from `first` on with 32 keys from block k of the packed keys.
  template <bool both>
  KVZAP_INLINE_AVX512_BF16 void score(const AmxPrefill& x, std::int64_t first, int k,
                                      char* scores) {
    const int steps = x.m_steps;
    const char* a = x.m_queries + first / block * steps * step_bytes;
    const char* b = x.m_keys + k * steps * step_bytes;
    zero<both>();
    for (int s = 0; s < steps; ++s, a += step_bytes, b += step_bytes) {
      multiply_parts<both, false>(a, b);
    }
    store<both>(scores);
    if (__builtin_expect(x.m_soft_cap > 0, 0)) cap_scores<both>(x, first, scores);
  }

  /// The cap holds for scaled scores, of which x.m_scaling has a factor log2(e).
  template <bool both>
  KVZAP_TARGET_AVX512_BF16 __attribute__((noinline)) static void cap_scores(const AmxPrefill& x,
                                                                            std::int64_t first,
                                                                            char* scores) {
    const float cap = x.m_soft_cap * 1.44269504f;
    auto* const values = reinterpret_cast<float*>(scores);
    if (!Format::scales_queries) {
      return linalg::soft_cap(values, (both ? 4 : 2) * tile_bytes / 4, cap / x.m_scaling);
    }
    for (int row = 0; row < (both ? block : block / 2); ++row) {
      float* const own = values + offset_of(row) / 4;
      linalg::soft_cap(own, 16, cap / x.scaling_of(first + row));
      linalg::soft_cap(own + tile_bytes / 4, 16, cap / x.scaling_of(first + row));
    }
  }

  /// Turns a row's scores with 32 keys into weights; it sees `lanes` of them. Adds them to *total.
  KVZAP_INLINE_AVX512_BF16 void soften(const char* scores, float scaling, float shift,
                                       std::uint32_t lanes, char* weights, float* total) {
    using base::Vec16;
    const Vec16 factor = Vec16::all(scaling), by = Vec16::all(shift);
    const auto* const score = reinterpret_cast<const float*>(scores);
    __m512 first = avx512::exp2_of(fms(Vec16::load(score), factor, by)).v;
    __m512 second = avx512::exp2_of(fms(Vec16::load(score + tile_bytes / 4), factor, by)).v;
    if (lanes != ~0u) {
      first = _mm512_maskz_mov_ps(low(lanes), first);
      second = _mm512_maskz_mov_ps(high(lanes), second);
    }
    __m512i rounded[parts];
    By::round(first, second, rounded);
    store_parts(rounded, weights);
    // The total is the sum of the rounded weights.
    _mm512_store_ps(total, _mm512_add_ps(_mm512_load_ps(total), By::sum_of(rounded)));
  }

  /// Returns the place of a block's row among the scores with 32 keys; half of it if a row half has
  /// one tile.
  KVZAP_INLINE_AVX512_BF16 int offset_of(int row) {
    return row / 16 * 2 * tile_bytes + row % 16 * 64;
  }

  KVZAP_INLINE_AVX512_BF16 void scale(float* x, __m512 factor) {
    _mm512_store_ps(x, _mm512_mul_ps(_mm512_load_ps(x), factor));
  }

  /// Raises a row's shift to its largest score with the first `blocks` times 32 keys, which are in
  /// m_scores. Returns false and keeps the shift if all scores that the row sees are -infinity.
  KVZAP_TARGET_AVX512_BF16 static bool raise(AmxPrefill& x, std::int64_t row, int blocks) {
    const char* const scores = x.m_scores + offset_of(static_cast<int>(row % block));
    const int limit = x.limit_of(row);
    __m512 most = _mm512_set1_ps(minus_infinity);
    std::uint32_t nans = 0;
    for (int k = 0; k < blocks; ++k) {
      const std::uint32_t lanes = first_lanes(limit - k * block);
      const auto* const score = reinterpret_cast<const float*>(scores + k * 4 * tile_bytes);
      const __m512 first = _mm512_load_ps(score);
      const __m512 second = _mm512_load_ps(score + tile_bytes / 4);
      // max returns its last operand if one is NaN, so NaN never becomes the maximum.
      most = _mm512_mask_max_ps(most, low(lanes), first, most);
      most = _mm512_mask_max_ps(most, high(lanes), second, most);
      nans |= _mm512_mask_cmp_ps_mask(low(lanes), first, first, _CMP_UNORD_Q);
      nans |= _mm512_mask_cmp_ps_mask(high(lanes), second, second, _CMP_UNORD_Q);
    }
    const float before = x.m_shifts[row];
    float shift = _mm512_reduce_max_ps(most) * x.scaling_of(row) - By::headroom;
    if (shift == minus_infinity) {
      if (nans == 0) return false;
      shift = 0;  // any number but NaN: all weights of the row, and no others, become NaN
    }
    if (!std::isnan(before)) {
      shift = std::max(shift, before);
      if (!x.m_first) {
        const __m512 factor = _mm512_set1_ps(std::exp2(before - shift));
        for (int c = 0; c < 2 * x.m_steps; ++c) scale(x.sums_of(row, c), factor);
        scale(x.m_totals + row * 16, factor);
      }
    }
    x.m_shifts[row] = shift;
    return true;
  }

  KVZAP_INLINE_AVX512_BF16 bool is_large(const float* total) {
    return _mm512_cmp_ps_mask(_mm512_load_ps(total), _mm512_set1_ps(By::large), _CMP_NLE_UQ) != 0;
  }

  /// Computes weights and totals of `count` rows from `first` on with `blocks` times 32 staged
  /// keys.
  template <bool both>
  KVZAP_TARGET_AVX512_BF16 static void weigh(AmxPrefill& x, std::int64_t first, int count,
                                             int blocks) {
    alignas(64) float totals[block][16] = {};
    int limits[block];
    for (int r = 0; r < count; ++r) limits[r] = x.limit_of(first + r);
    const float constant = x.m_scaling;
    const float* const shifts = x.m_shifts + first;
    [[maybe_unused]] const float* const scalings = x.m_scalings + first;
    if (x.m_first) {
      score<both>(x, first, 0, x.m_scores);
      for (int r = 0; r < count; ++r) raise(x, first + r, 1);
    }
    char* weights = x.m_weights;
    for (int k = 0; k < blocks; ++k, weights += step_bytes) {
      char* const scores = x.m_scores + k % 2 * 4 * tile_bytes;  // stays in the level-1 cache
      score<both>(x, first, k, scores);
      if (k * block + block <= limits[0]) {
        // In fours: results of rows after the last one are not read.
        for (int q = 0; q < count; q += 4) {
#pragma GCC unroll 4
          for (int r = q; r < q + 4; ++r) {
            soften(scores + offset_of(r), Format::scales_queries ? scalings[r] : constant,
                   shifts[r], ~0u, weights + r * 64, totals[r]);
          }
        }
      } else {
        for (int r = 0; r < count; ++r) {
          soften(scores + offset_of(r), Format::scales_queries ? scalings[r] : constant, shifts[r],
                 first_lanes(limits[r] - k * block), weights + r * 64, totals[r]);
        }
      }
    }
    std::uint32_t large = 0;
    for (int r = 0; r < count; ++r) large |= std::uint32_t{is_large(totals[r])} << r;
    if (__builtin_expect(large != 0, 0)) weigh_again<both>(x, first, blocks, large, totals);
    for (int r = 0; r < count; ++r) {
      float* const total = x.m_totals + (first + r) * 16;
      _mm512_store_ps(total, _mm512_add_ps(_mm512_load_ps(total), _mm512_load_ps(totals[r])));
    }
  }

  /// The same for the given rows of a block, after raising their shifts to those of all staged
  /// keys.
  template <bool both>
  KVZAP_TARGET_AVX512_BF16 __attribute__((noinline)) static void weigh_again(
      AmxPrefill& x, std::int64_t first, int blocks, std::uint32_t rows, float (*totals)[16]) {
    for (int k = 0; k < blocks; ++k) score<both>(x, first, k, x.m_scores + k * 4 * tile_bytes);
    for (int r = 0; r < block; ++r) {
      if ((rows >> r & 1) == 0) continue;
      const std::int64_t row = first + r;
      const int limit = raise(x, row, blocks) ? x.limit_of(row) : 0;
      _mm512_store_ps(totals[r], _mm512_setzero_ps());
      for (int k = 0; k < blocks; ++k) {
        soften(x.m_scores + k * 4 * tile_bytes + offset_of(r), x.scaling_of(row), x.m_shifts[row],
               first_lanes(limit - k * block), x.m_weights + k * step_bytes + r * 64, totals[r]);
      }
    }
  }

  template <bool both>
  KVZAP_TARGET_AVX512_BF16 static void add_weighted(AmxPrefill& x, std::int64_t first, int blocks) {
    for (int s = 0; s < x.m_steps; ++s) {
      char* const sums =
          reinterpret_cast<char*>(x.m_sums) + (first / block * x.m_steps + s) * 4 * tile_bytes;
      if (x.m_first) {
        zero<both>();
      } else {
        load<both>(sums);
      }
      const char* a = x.m_weights;
      const char* b = x.m_values + s * (tile_keys / block) * step_bytes;
      for (int k = 0; k < blocks; ++k, a += step_bytes, b += step_bytes) {
        multiply_parts<both, true>(a, b);
      }
      store<both>(sums);
    }
  }

  /// The same over exactly the staged values that each row sees.
  static void add_seen(AmxPrefill& x, std::int64_t first, int count) {
    for (int r = 0; r < count; ++r) {
      const int limit = x.limit_of(first + r);
      for (int d = 0; d < x.m_dim; ++d) {
        float* const target = x.sums_of(first + r, d / 16) + d % 16;
        float sum = x.m_first ? 0.0f : *target;
        for (int k = 0; k < limit; ++k) {
          const char* source = x.m_weights + k / block * step_bytes + r * 64 + k % block * 2;
          float weight = 0;
          for (int p = 0; p < parts; ++p, source += part_bytes) {
            typename By::Packed part{};
            std::memcpy(&part, source, sizeof(part));
            weight += static_cast<float>(part);
          }
          sum += weight * static_cast<float>(x.m_value_rows[k][d]);
        }
        *target = sum;
      }
    }
  }

  template <bool both>
  KVZAP_TARGET_AVX512_BF16 static void attend_block(AmxPrefill& x, std::int64_t first, int count,
                                                    const std::uint8_t* not_finite) {
    const int limit = x.limit_of(first + count - 1);
    if (limit == 0) return;
    const int blocks = (limit + block - 1) / block;
    weigh<both>(x, first, count, blocks);
    // The products multiply values that a row does not see by 0, which must give 0.
    bool exactly = false;
    if (not_finite) {
      for (int k = x.limit_of(first); k < std::min(blocks * block, x.m_staged); ++k) {
        exactly = exactly || not_finite[k] != 0;
      }
    }
    if (exactly) {
      add_seen(x, first, count);
    } else {
      add_weighted<both>(x, first, blocks);
    }
  }

  KVZAP_TARGET_AVX512_BF16 static void attend(AmxPrefill& x) {
    pack(x);
    std::uint8_t not_finite[tile_keys];
    std::uint8_t any = 0;
    for (int k = x.limit_of(0); k < x.m_staged; ++k) {
      not_finite[k] = is_finite(x.m_value_rows[k], x.m_dim) ? 0 : 1;
      any |= not_finite[k];
    }
    for (std::int64_t first = 0; first < x.m_rows; first += block) {
      const int count = static_cast<int>(std::min<std::int64_t>(block, x.m_rows - first));
      if (count > 16) {
        attend_block<true>(x, first, count, any ? not_finite : nullptr);
      } else {
        attend_block<false>(x, first, count, any ? not_finite : nullptr);
      }
    }
  }
};
#endif

template <class Format>
void AmxPrefill<Format>::begin([[maybe_unused]] const float* queries, std::int64_t tokens,
                               [[maybe_unused]] std::int64_t token_stride,
                               [[maybe_unused]] std::int64_t head_stride,
                               [[maybe_unused]] std::int64_t dim_stride, std::int64_t visible) {
  m_rows = tokens * m_group;
  m_visible = visible;
  m_staged = 0;
  m_first = true;
  std::fill_n(m_totals, m_rows * 16, 0.0f);
  std::fill_n(m_shifts, whole(m_rows, block), std::numeric_limits<float>::quiet_NaN());
#if KVZAP_X86
  for (std::int64_t row = 0; row < m_rows; ++row) {
    const float* source = queries + row / m_group * token_stride + row % m_group * head_stride;
    if (dim_stride != 1) {
      for (int d = 0; d < m_dim; ++d) m_sums[d] = source[d * dim_stride];  // m_sums is still free
      source = m_sums;
    }
    Kernels<EmulatedTiles>::round_query(*this, row, source);
  }
#endif
}

template <class Format>
void AmxPrefill<Format>::attend(const RowRun<Value>& run) {
  for (std::int64_t r = 0; r < run.rows; ++r) {
    const auto stage = [&](const Value* source, Value* copy) -> const Value* {
      if (run.dim_stride == 1) return source;
      for (int d = 0; d < m_dim; ++d) copy[d] = source[d * run.dim_stride];
      return copy;
    };
    Value* const copy = m_copies + std::int64_t{m_staged} * 2 * m_dim;
    m_key_rows[m_staged] = stage(run.keys + r * run.row_stride, copy);
    m_value_rows[m_staged] = stage(run.values + r * run.row_stride, copy + m_dim);
    if (++m_staged == tile_keys) attend_staged();
  }
}

template <class Format>
void AmxPrefill<Format>::attend_staged() {
#if KVZAP_X86_TILES
  if (!m_emulated) Kernels<TileRegisters>::attend(*this);
#endif
#if KVZAP_X86
  if (m_emulated) Kernels<EmulatedTiles>::attend(*this);
#endif
  m_visible -= m_staged;
  m_staged = 0;
  m_first = false;
}

template <class Format>
void AmxPrefill<Format>::finish(float* output, std::int64_t token_stride, std::int64_t head_stride,
                                std::int64_t dim_stride, float* lse, std::int64_t lse_token_stride,
                                std::int64_t lse_head_stride) {
  if (m_staged > 0) attend_staged();
  constexpr float ln2 = 0.693147181f;
  for (std::int64_t row = 0; row < m_rows; ++row) {
    const std::int64_t token = row / m_group;
    const std::int64_t head = row % m_group;
    const float total = total_of(row);
    copy_sums(row, inverse_of(total), output + token * token_stride + head * head_stride,
              dim_stride);
    if (lse) {
      lse[token * lse_token_stride + head * lse_head_stride] =
          log_sum_exp(m_shifts[row] * ln2, total);
    }
  }
}

template <class Format>
void AmxPrefill<Format>::finish(float* maximum, float* weight, float* sums) {
  if (m_staged > 0) attend_staged();
  for (std::int64_t row = 0; row < m_rows; ++row) {
    weight[row] = total_of(row);
    maximum[row] = std::isnan(m_shifts[row]) ? minus_infinity : m_shifts[row] / m_scaling;
    copy_sums(row, 1, sums + row * m_dim, 1);
  }
}

template class AmxPrefill<BfloatTiles>;
template class AmxPrefill<HalfTiles>;
template class AmxPrefill<SplitHalfTiles>;

}  // namespace kvzap::attention

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
