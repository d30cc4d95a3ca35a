#include "attention/host/flash_prefill.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "attention/host/vector_math.hpp"
#include "base/instantiate.hpp"
#include "linalg/host/row_kernels.hpp"

// Within a block of rows that a kernel works on, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace kvzap::detail {
namespace {

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

// Rows of a tile (query tokens times group) and keys of a tile. With 128 dimensions, queries,
// scores, sums and packed keys and values take half a level-2 cache of 1 MiB, and one packed panel
// half a level-1 cache.
constexpr std::int64_t tile_rows = 264;
constexpr int tile_keys = 128;

constexpr std::int64_t whole(std::int64_t count, std::int64_t unit) {
  return (count + unit - 1) / unit * unit;
}

// Rows, and vectors of 16 columns, of the block of sums that a matrix product keeps in registers.
constexpr int block_rows(bool pairs) { return pairs ? 6 : 12; }
[[maybe_unused]] constexpr int block_vectors(bool pairs) { return pairs ? 4 : 2; }

constexpr std::int64_t padded_rows(int group) {
  return whole(std::max<std::int64_t>(tile_rows, group), 12);
}

}  // namespace

template <class Value>
bool FlashPrefill<Value>::available() {
  return KVZAP_X86 && simd_level() >= SimdLevel::avx512;
}

template <class Value>
std::int64_t FlashPrefill<Value>::tile_tokens(int group) {
  return std::max<std::int64_t>(1, tile_rows / group);
}

template <class Value>
std::int64_t FlashPrefill<Value>::scratch_size(int group, int dim) {
  const std::int64_t padded = whole(dim, 16);
  return padded_rows(group) * (2 * padded + tile_keys) + 3 * whole(padded_rows(group), 16) +
         4 * tile_keys * padded;
}

#if KVZAP_X86
namespace {

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
KVZAP_TARGET_AVX512 void multiply(int steps, const float* a, std::int64_t a_stride, const float* b,
                                  float* c, std::int64_t c_stride, const float* factor) {
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
KVZAP_TARGET_AVX512 void transpose(const float* source, std::int64_t source_stride, float* target,
                                   std::int64_t target_stride) {
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

/// target[c] = source (even row)[c] and (odd row)[c] as a pair.
KVZAP_TARGET_AVX512 void interleave(const std::uint16_t* even, const std::uint16_t* odd,
                                    float* target, int columns) {
  for (int c = 0; c < columns; c += 16) {
    const __m512i low =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + c)));
    const __m512i high =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd + c)));
    _mm512_store_si512(target + c, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
}

/// Takes `count` >= 1 scores into the running maximum of a row. Returns what is to be subtracted
/// from scores before exp; factor: that of earlier weights and sums.
KVZAP_INLINE_AVX512 __m512 raise_row(const float* scores, int count, float scaling, float* maximum,
                                     float* factor) {
  const __m512 none = _mm512_set1_ps(minus_infinity);
  const float before = *maximum;
  // The second operand is the result if one is NaN: NaN never becomes the maximum.
  __m512 largest = _mm512_set1_ps(before);
  int k = 0;
  for (; k + 16 <= count; k += 16) largest = _mm512_max_ps(_mm512_load_ps(scores + k), largest);
  if (k < count) {
    const __mmask16 mask = static_cast<__mmask16>(0xffffu >> (16 - (count - k)));
    largest = _mm512_max_ps(_mm512_mask_load_ps(none, mask, scores + k), largest);
  }
  const float now = _mm512_reduce_max_ps(largest);
  *factor = now > before ? std::exp((before - now) * scaling) : 1.0f;
  *maximum = now;
  return shift_of(_mm512_set1_ps(now));
}

KVZAP_INLINE_AVX512 __m512 exponential(const float* scores, int left, __m512 shift,
                                       __m512 scaling) {
  const __mmask16 mask = static_cast<__mmask16>(left >= 16  ? 0xffffu
                                                : left <= 0 ? 0u
                                                            : 0xffffu >> (16 - left));
  const __m512 score = _mm512_maskz_loadu_ps(mask, scores);
  return _mm512_maskz_mov_ps(mask,
                             exp_nonpositive(_mm512_mul_ps(_mm512_sub_ps(score, shift), scaling)));
}

/// Replaces `count` scores by exponentials, and those after them up to `padded` by 0.
KVZAP_TARGET_AVX512 void online_softmax_row(float* scores, int count, int padded, float scaling,
                                            float* maximum, float* weight, float* factor) {
  const __m512 shift = raise_row(scores, count, scaling, maximum, factor);
  const __m512 by = _mm512_set1_ps(scaling);
  __m512 total = _mm512_setzero_ps();
  for (int k = 0; k < padded; k += 16) {
    const __m512 p = exponential(scores + k, count - k, shift, by);
    total = _mm512_add_ps(total, p);
    _mm512_store_ps(scores + k, p);
  }
  *weight = *weight * *factor + _mm512_reduce_add_ps(total);
}

/// The same, where exponentials become bfloat16, in the first half of the row.
KVZAP_TARGET_AVX512_BF16 void online_softmax_row_pairs(float* scores, int count, int padded,
                                                       float scaling, float* maximum, float* weight,
                                                       float* factor) {
  const __m512 shift = raise_row(scores, count, scaling, maximum, factor);
  const __m512 by = _mm512_set1_ps(scaling);
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  __m512 total = _mm512_setzero_ps();
  for (int k = 0; k < padded; k += 32) {
    const __m512 low = exponential(scores + k, count - k, shift, by);
    const __m512 high = exponential(scores + k + 16, count - k - 16, shift, by);
    const __m512bh rounded = _mm512_cvtne2ps_pbh(high, low);
    total = _mm512_dpbf16_ps(total, rounded, ones);
    _mm512_store_si512(scores + k / 2, (__m512i)rounded);
  }
  *weight = *weight * *factor + _mm512_reduce_add_ps(total);
}

}  // namespace
#endif

template <class Value>
FlashPrefill<Value>::FlashPrefill(int group, int dim, float* scratch)
    : m_group(group),
      m_dim(dim),
      m_pairs(std::is_same_v<Value, bfloat16> && simd_level() >= SimdLevel::avx512_bf16),
      m_words(static_cast<int>(m_pairs ? whole(whole(dim, 2) / 2, 16) : whole(dim, 16))),
      m_columns(static_cast<int>(whole(dim, 16))) {
  const std::int64_t rows = padded_rows(group);
  const std::int64_t padded = m_columns;
  const auto take = [&](std::int64_t count) {
    float* const taken = scratch;
    scratch += count;
    return taken;
  };
  m_queries = take(rows * padded);
  m_sums = take(rows * padded);
  m_scores = take(rows * tile_keys);
  m_maximum = take(whole(rows, 16));
  m_weight = take(whole(rows, 16));
  m_factor = take(whole(rows, 16));
  m_staging_keys = take(tile_keys * padded);
  m_staging_values = take(tile_keys * padded);
  m_keys = take(tile_keys * padded);
  m_values = take(tile_keys * padded);
}

template <class Value>
void FlashPrefill<Value>::begin(const float* queries, std::int64_t tokens,
                                std::int64_t token_stride, std::int64_t head_stride,
                                std::int64_t dim_stride, std::int64_t visible) {
  m_tokens = tokens;
  m_visible = visible;
  m_staged = 0;
  const std::int64_t rows = tokens * m_group;
  const std::int64_t padded = whole(rows, block_rows(m_pairs));
  std::fill_n(m_queries, padded * m_words, 0.0f);
  std::fill_n(m_sums, padded * m_columns, 0.0f);
  std::fill_n(m_maximum, padded, minus_infinity);
  std::fill_n(m_weight, padded, 0.0f);
  std::fill_n(m_factor, padded, 1.0f);
  for (std::int64_t row = 0; row < rows; ++row) {
    const float* source = queries + row / m_group * token_stride + row % m_group * head_stride;
    float* const target = m_queries + row * m_words;
    for (int d = 0; d < m_dim; ++d) {
      if (m_pairs) {
        reinterpret_cast<bfloat16*>(target)[d] = bfloat16(source[d * dim_stride]);
      } else {
        target[d] = source[d * dim_stride];
      }
    }
  }
}

template <class Value>
void FlashPrefill<Value>::attend(const RowRun<Value>& run) {
  for (std::int64_t r = 0; r < run.rows; ++r) {
    const auto stage = [&](const Value* source, float* target, int words) {
      if (m_pairs) {
        Value* const row = reinterpret_cast<Value*>(target);
        if (run.dim_stride == 1) {
          std::memcpy(row, source, m_dim * sizeof(Value));
        } else {
          for (int d = 0; d < m_dim; ++d) row[d] = source[d * run.dim_stride];
        }
        std::memset(row + m_dim, 0, words * sizeof(float) - m_dim * sizeof(Value));
      } else {
        if (run.dim_stride == 1) {
          widen(source, target, m_dim);
        } else {
          for (int d = 0; d < m_dim; ++d) {
            target[d] = static_cast<float>(source[d * run.dim_stride]);
          }
        }
        std::fill(target + m_dim, target + words, 0.0f);
      }
    };
    stage(run.keys + r * run.row_stride, m_staging_keys + std::int64_t{m_staged} * m_words,
          m_words);
    stage(run.values + r * run.row_stride, m_staging_values + std::int64_t{m_staged} * m_columns,
          m_columns);
    if (++m_staged == tile_keys) attend_staged();
  }
}

template <class Value>
void FlashPrefill<Value>::attend_staged() {
#if KVZAP_X86
  const int keys = m_staged;
  const int R = block_rows(m_pairs);
  const int width = block_vectors(m_pairs) * 16;
  const int words = m_pairs ? (m_dim + 1) / 2 : m_dim;
  const int padded_keys = static_cast<int>(whole(keys, width));
  for (int k = keys; k < padded_keys; ++k) {
    std::fill_n(m_staging_keys + std::int64_t{k} * m_words, m_words, 0.0f);
    std::fill_n(m_staging_values + std::int64_t{k} * m_columns, m_columns, 0.0f);
  }
  for (int k = 0; k < padded_keys; k += 16) {
    float* const panel = m_keys + std::int64_t{k / width * width} * m_words + k % width;
    for (int w = 0; w < m_words; w += 16) {
      transpose(m_staging_keys + std::int64_t{k} * m_words + w, m_words, panel + w * width, width);
    }
  }
  const int steps_of_values = m_pairs ? padded_keys / 2 : padded_keys;
  // Full panels first, the rest in panels of one vector.
  const auto width_at = [&](int column) { return column + width <= m_columns ? width : 16; };
  for (int c = 0; c < m_columns; c += width_at(c)) {
    float* const panel = m_values + std::int64_t{c} * steps_of_values;
    const int own = width_at(c);
    for (int s = 0; s < steps_of_values; ++s) {
      if (m_pairs) {
        const float* even = m_staging_values + std::int64_t{2} * s * m_columns;
        interleave(reinterpret_cast<const std::uint16_t*>(even) + c,
                   reinterpret_cast<const std::uint16_t*>(even + m_columns) + c, panel + s * own,
                   own);
      } else {
        std::memcpy(panel + s * own, m_staging_values + std::int64_t{s} * m_columns + c,
                    own * sizeof(float));
      }
    }
  }

  const std::int64_t rows = m_tokens * m_group;
  // Keys of the tile that a row's token sees.
  const auto limit_of = [&](std::int64_t row) {
    return static_cast<int>(std::clamp<std::int64_t>(m_visible + row / m_group, 0, keys));
  };
  const auto last_limit = [&](std::int64_t row) { return limit_of(std::min(row + R, rows) - 1); };
  const auto product_of_scores = m_pairs ? multiply_pairs<6, 4> : multiply<12, 2>;
  for (int k = 0; k < padded_keys; k += width) {
    for (std::int64_t row = 0; row < rows; row += R) {
      if (last_limit(row) <= k) continue;
      product_of_scores(words, m_queries + row * m_words, m_words,
                        m_keys + std::int64_t{k} * m_words, m_scores + row * tile_keys + k,
                        tile_keys, nullptr);
    }
  }
  const float scaling = 1.0f / std::sqrt(static_cast<float>(m_dim));
  for (std::int64_t row = 0; row < rows; ++row) {
    const int limit = limit_of(row);
    const int padded = static_cast<int>(whole(last_limit(row / R * R), 32));
    float* const scores = m_scores + row * tile_keys;
    if (limit == 0) {
      m_factor[row] = 1;
      std::fill_n(scores, padded, 0.0f);
    } else {
      const auto online_softmax = m_pairs ? online_softmax_row_pairs : online_softmax_row;
      online_softmax(scores, limit, padded, scaling, m_maximum + row, m_weight + row,
                     m_factor + row);
    }
  }
  for (int c = 0; c < m_columns; c += width_at(c)) {
    const auto product = width_at(c) == width ? (m_pairs ? multiply_pairs<6, 4> : multiply<12, 2>)
                                              : (m_pairs ? multiply_pairs<6, 1> : multiply<12, 1>);
    for (std::int64_t row = 0; row < rows; row += R) {
      const int limit = last_limit(row);
      if (limit == 0) continue;
      product(m_pairs ? (limit + 1) / 2 : limit, m_scores + row * tile_keys, tile_keys,
              m_values + std::int64_t{c} * steps_of_values, m_sums + row * m_columns + c, m_columns,
              m_factor + row);
    }
  }
  m_visible -= keys;
  m_staged = 0;
#endif
}

template <class Value>
void FlashPrefill<Value>::finish(float* output, std::int64_t token_stride, std::int64_t head_stride,
                                 std::int64_t dim_stride) {
  if (m_staged > 0) attend_staged();
  for (std::int64_t row = 0; row < m_tokens * m_group; ++row) {
    float* const target = output + row / m_group * token_stride + row % m_group * head_stride;
    const float inverse = 1.0f / m_weight[row];
    for (int d = 0; d < m_dim; ++d) target[d * dim_stride] = m_sums[row * m_columns + d] * inverse;
  }
}

#define KVZAP_INSTANTIATE(Value) template class FlashPrefill<Value>;
KVZAP_FOR_EACH_VALUE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap::detail

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
