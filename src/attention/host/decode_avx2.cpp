#include "attention/host/decode_avx2.hpp"

#include "attention/softmax.hpp"
#include "base/value_types.hpp"

#if KVZAP_X86

// Within a block of rows that a kernel works on, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace kvzap::attention {
namespace {

/// 16 dims of a row as floats, in the order of avx2_lane_of_dim.
struct Wide16 {
  __m256 low, high;
};

KVZAP_INLINE_AVX2 Wide16 load_wide(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}

KVZAP_INLINE_AVX2 Wide16 wide_of(const half* /*type*/, __m256i bits) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(bits)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1))};
}

KVZAP_INLINE_AVX2 Wide16 load_wide(const half* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}

KVZAP_INLINE_AVX2 Wide16 wide_of(const bfloat16* /*type*/, __m256i bits) {
  const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(bits, odd))};
}

KVZAP_INLINE_AVX2 Wide16 load_wide(const bfloat16* p) {
  return wide_of(p, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

/// Loads the first `count` < 16 dims as floats; the others are 0 and not read.
KVZAP_INLINE_AVX2 Wide16 load_wide(const float* p, int count) {
  return {_mm256_maskload_ps(p, lanes_before(count, 0)),
          _mm256_maskload_ps(p + 8, lanes_before(count, 8))};
}

template <class Value>
KVZAP_INLINE_AVX2 Wide16 load_wide(const Value* p, int count) {
  static_assert(sizeof(Value) == 2);
  __m256i bits = _mm256_maskload_epi32(reinterpret_cast<const int*>(p), lanes_before(count / 2, 0));
  if (count % 2 != 0) {
    // The first half of the word behind the whole words.
    const int last = p[count - 1].bits;
    const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i here = _mm256_cmpeq_epi32(_mm256_set1_epi32(count / 2), index);
    bits = _mm256_or_si256(bits, _mm256_and_si256(here, _mm256_set1_epi32(last)));
  }
  return wide_of(p, bits);
}

/// Loads 16 dims, or the first `count` < 16 if `is_part`.
template <bool is_part, class Value>
KVZAP_INLINE_AVX2 Wide16 load_dims(const Value* p, int count) {
  if constexpr (is_part) {
    return load_wide(p, count);
  } else {
    return load_wide(p);
  }
}

/// Loads the second half of the dims of load_dims.
template <bool is_part, class Value>
KVZAP_INLINE_AVX2 __m256 load_high(const Value* p, int count) {
  if constexpr (is_part || !std::is_same_v<Value, bfloat16>) {
    return load_dims<is_part>(p, count).high;
  } else {
    // Load the mask from memory: in a register it would push out the query, which GCC then loads
    // once per product.
    alignas(32) static constexpr std::uint32_t odd[8] = {0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                         0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                         0xffff0000u, 0xffff0000u};
    __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    asm("vpand %1, %0, %0" : "+x"(bits) : "m"(odd));
    return _mm256_castsi256_ps(bits);
  }
}

/// Returns a vector whose lane i is the sum of vector i.
KVZAP_INLINE_AVX2 __m256 fold_eight(const __m256* v) {
  __m256 two[4], four[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    two[i] = _mm256_add_ps(_mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]),
                           _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m256d x = _mm256_castps_pd(two[2 * i]), y = _mm256_castps_pd(two[2 * i + 1]);
    four[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)),
                            _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
  }
  return _mm256_add_ps(_mm256_permute2f128_ps(four[0], four[1], 0x20),
                       _mm256_permute2f128_ps(four[0], four[1], 0x31));
}

/// sums[row][query] += products of 16 dims of `unit` rows with G queries [G][16], or of the first
/// `left` dims if `is_part`. One half follows the other: there are registers for one.
template <bool is_part, int G, int unit, class Value>
KVZAP_INLINE_AVX2 void multiply_dims(const Value* const* rows, int left, const float* queries,
                                     __m256* sums) {
  __m256 key[unit];
#pragma GCC unroll 8
  for (int i = 0; i < unit; ++i) key[i] = load_dims<is_part>(rows[i], left).low;
#pragma GCC unroll 4
  for (int q = 0; q < G; ++q) {
    const __m256 query = _mm256_load_ps(queries + q * 16);
#pragma GCC unroll 8
    for (int i = 0; i < unit; ++i) {
      sums[i * G + q] = _mm256_fmadd_ps(key[i], query, sums[i * G + q]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < unit; ++i) key[i] = load_high<is_part>(rows[i], left);
#pragma GCC unroll 4
  for (int q = 0; q < G; ++q) {
    const __m256 query = _mm256_load_ps(queries + q * 16 + 8);
#pragma GCC unroll 8
    for (int i = 0; i < unit; ++i) {
      sums[i * G + q] = _mm256_fmadd_ps(key[i], query, sums[i * G + q]);
    }
  }
}

/// Computes scores of 1 <= rows <= decode_block_rows rows and G query heads. Lane e of vector u
/// belongs to row u * 8 / G + e / G and query e % G. Lanes past the last row hold arbitrary scores.
template <class Value, int G>
KVZAP_TARGET_AVX2 void score_avx2(const Value* keys, std::int64_t stride, int rows,
                                  const float* queries, int dim, float* scores, Ahead& ahead) {
  constexpr int unit = 8 / G;
  const int steps = dim / 16, left = dim % 16;
  for (int first = 0; first < rows; first += unit, scores += 8) {
    const Value* row[unit];
#pragma GCC unroll 8
    for (int i = 0; i < unit; ++i) row[i] = keys + std::min(first + i, rows - 1) * stride;
    ahead.step();
    __m256 sums[8];
#pragma GCC unroll 8
    for (int e = 0; e < 8; ++e) sums[e] = _mm256_setzero_ps();
    const float* query = queries;
    for (int s = 0; s < steps; ++s, query += 16 * G) {
      multiply_dims<false, G, unit>(row, 0, query, sums);
#pragma GCC unroll 8
      for (int i = 0; i < unit; ++i) row[i] += 16;
    }
    if (left > 0) multiply_dims<true, G, unit>(row, left, query, sums);
    _mm256_store_ps(scores, fold_eight(sums));
  }
}

/// The same sums for two times four lanes.
KVZAP_INLINE_AVX2 __m128 fold_four(const __m256* v) {
  const __m256 a = _mm256_add_ps(_mm256_unpacklo_ps(v[0], v[1]), _mm256_unpackhi_ps(v[0], v[1]));
  const __m256 b = _mm256_add_ps(_mm256_unpacklo_ps(v[2], v[3]), _mm256_unpackhi_ps(v[2], v[3]));
  const __m256d x = _mm256_castps_pd(a), y = _mm256_castps_pd(b);
  const __m256 sum = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)),
                                   _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
  return _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
}

// Rows that are scored with four queries at once. Their sums take 12 of the 16 registers; the
// others just suffice for the widened values, one half after the other. (Rows of floats gain
// nothing.)
constexpr int rows_by_four = 3;

/// The same scores as score_avx2's, of four queries.
template <class Value>
KVZAP_TARGET_AVX2 void score_by_four_avx2(const Value* keys, std::int64_t stride, int rows,
                                          const float* queries, int dim, float* scores,
                                          Ahead& ahead) {
  constexpr int unit = rows_by_four;
  const int steps = dim / 16, left = dim % 16;
  for (int first = 0; first < rows; first += unit) {
    const Value* row[unit];
#pragma GCC unroll 3
    for (int i = 0; i < unit; ++i) row[i] = keys + std::min(first + i, rows - 1) * stride;
    ahead.step();
    __m256 sums[4 * unit];
#pragma GCC unroll 12
    for (int e = 0; e < 4 * unit; ++e) sums[e] = _mm256_setzero_ps();
    const float* query = queries;
    for (int s = 0; s < steps; ++s, query += 64) {
      multiply_dims<false, 4, unit>(row, 0, query, sums);
#pragma GCC unroll 3
      for (int i = 0; i < unit; ++i) row[i] += 16;
    }
    if (left > 0) multiply_dims<true, 4, unit>(row, left, query, sums);
#pragma GCC unroll 3
    for (int i = 0; i < unit; ++i) {
      if (first + i < rows) _mm_store_ps(scores + (first + i) * 4, fold_four(sums + i * 4));
    }
  }
}

/// The same for one query, row after row in memory order, which the processor's prefetcher follows.
template <class Value>
KVZAP_TARGET_AVX2 void score_in_order_avx2(const Value* keys, std::int64_t stride, int rows,
                                           const float* query, int dim, float* scores,
                                           Ahead& ahead) {
  const int steps = dim / 16, left = dim % 16;
  for (int first = 0; first < rows; first += 8, scores += 8) {
    ahead.step();
    __m256 sums[8];
#pragma GCC unroll 1
    for (int i = 0; i < 8; ++i) {
      const Value* row = keys + std::min(first + i, rows - 1) * stride;
      __m256 low = _mm256_setzero_ps(), high = _mm256_setzero_ps();
      for (int s = 0; s < steps; ++s) {
        const Wide16 key = load_wide(row + s * 16);
        low = _mm256_fmadd_ps(key.low, _mm256_load_ps(query + s * 16), low);
        high = _mm256_fmadd_ps(key.high, _mm256_load_ps(query + s * 16 + 8), high);
      }
      if (left > 0) {
        const Wide16 key = load_wide(row + steps * 16, left);
        low = _mm256_fmadd_ps(key.low, _mm256_load_ps(query + steps * 16), low);
        high = _mm256_fmadd_ps(key.high, _mm256_load_ps(query + steps * 16 + 8), high);
      }
      sums[i] = _mm256_add_ps(low, high);
    }
    _mm256_store_ps(scores, fold_eight(sums));
  }
}

/// Returns, in each lane, the maximum over the lanes of the same query.
template <int G>
KVZAP_INLINE_AVX2 __m256 max_by_query(__m256 x) {
  x = _mm256_max_ps(x, _mm256_permute2f128_ps(x, x, 0x01));
  if constexpr (G <= 2) x = _mm256_max_ps(x, _mm256_permute_ps(x, 0x4e));
  if constexpr (G == 1) x = _mm256_max_ps(x, _mm256_permute_ps(x, 0xb1));
  return x;
}

/// Updates the running maximum with the scores of `rows` rows and rescales the weight and the sums.
/// Replaces the scores by exponentials, with 0 past the last row.
template <int G>
KVZAP_TARGET_AVX2 void online_softmax_avx2(float* scores, int rows, float scaling, float* maximum,
                                           float* weight, float* sums, int padded) {
  const int units = (rows * G + 7) / 8;
  float* const last = scores + (units - 1) * 8;
  const __m256i valid = lanes_before(rows * G, (units - 1) * 8);
  _mm256_store_ps(last, _mm256_blendv_ps(_mm256_set1_ps(minus_infinity), _mm256_load_ps(last),
                                         _mm256_castsi256_ps(valid)));
  const __m256 before = _mm256_load_ps(maximum);
  // max returns its second operand if one is NaN, so NaN never becomes the maximum.
  __m256 largest = before;
  for (int u = 0; u < units; ++u) {
    largest = _mm256_max_ps(_mm256_load_ps(scores + u * 8), largest);
  }
  largest = max_by_query<G>(largest);
  const __m256 raised = _mm256_cmp_ps(largest, before, _CMP_GT_OQ);
  const __m256 by = _mm256_set1_ps(scaling);
  __m256 total = _mm256_load_ps(weight);
  if (_mm256_movemask_ps(raised) != 0) {
    const __m256 difference = _mm256_and_ps(raised, _mm256_sub_ps(before, largest));
    const __m256 factor = exp_nonpositive(_mm256_mul_ps(difference, by));
    _mm256_store_ps(maximum, largest);
    total = _mm256_mul_ps(total, factor);
    alignas(32) float factors[8];
    _mm256_store_ps(factors, factor);
    for (int q = 0; q < G; ++q) {
      const __m256 own = _mm256_set1_ps(factors[q]);
      for (int d = 0; d < padded; d += 8) {
        float* const p = sums + q * padded + d;
        _mm256_store_ps(p, _mm256_mul_ps(_mm256_load_ps(p), own));
      }
    }
  }
  const __m256 shift = shift_of(largest);
  for (int u = 0; u < units; ++u) {
    const __m256 score = _mm256_load_ps(scores + u * 8);
    const __m256 p = exp_nonpositive(_mm256_mul_ps(_mm256_sub_ps(score, shift), by));
    total = _mm256_add_ps(total, p);
    _mm256_store_ps(scores + u * 8, p);
  }
  _mm256_store_ps(weight, total);
}

/// sum + weights[0] * first + weights[G] * second.
template <int G>
KVZAP_INLINE_AVX2 __m256 add_two(__m256 sum, __m256 first, __m256 second, const float* weights) {
  const __m256 product = _mm256_mul_ps(_mm256_broadcast_ss(weights), first);
  return _mm256_add_ps(sum, _mm256_fmadd_ps(_mm256_broadcast_ss(weights + G), second, product));
}

/// sums[q][16 * v ..] += weights[row][q] * values[row][16 * v ..] for V blocks of 16 dims. The last
/// block has `left` dims if `left` is not 0.
template <class Value, int G, int V, bool is_part>
KVZAP_TARGET_AVX2 void accumulate_avx2(const Value* values, std::int64_t stride, int rows,
                                       const float* weights, float* sums, int padded, int left,
                                       Ahead& ahead) {
  static_assert(G * V <= 4);
  __m256 low[G * V], high[G * V];
#pragma GCC unroll 4
  for (int q = 0; q < G; ++q) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      low[q * V + v] = _mm256_load_ps(sums + q * padded + v * 16);
      high[q * V + v] = _mm256_load_ps(sums + q * padded + v * 16 + 8);
    }
  }
  int r = 0;
  // Rows in twos: their products are added to each other before the sums, so that additions to the
  // same sum do not wait for each other.
  for (; G > 1 && r + 2 <= rows; r += 2) {
    const Value* const row = values + r * stride;
    ahead.step();
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const Value* const here = row + v * 16;
      const float* const own = weights + r * G;
      if constexpr (G == 4) {
        const Wide16 first = load_dims<is_part>(here, left);
        const Wide16 second = load_dims<is_part>(here + stride, left);
#pragma GCC unroll 4
        for (int q = 0; q < G; ++q) {
          low[q * V + v] = add_two<G>(low[q * V + v], first.low, second.low, own + q);
          high[q * V + v] = add_two<G>(high[q * V + v], first.high, second.high, own + q);
        }
      } else {
        // Works on one half after the other, because there are no registers for both.
        __m256 first = load_dims<is_part>(here, left).low;
        __m256 second = load_dims<is_part>(here + stride, left).low;
#pragma GCC unroll 4
        for (int q = 0; q < G; ++q) {
          low[q * V + v] = add_two<G>(low[q * V + v], first, second, own + q);
        }
        first = load_high<is_part>(here, left);
        second = load_high<is_part>(here + stride, left);
#pragma GCC unroll 4
        for (int q = 0; q < G; ++q) {
          high[q * V + v] = add_two<G>(high[q * V + v], first, second, own + q);
        }
      }
    }
  }
  for (; r < rows; ++r) {
    const Value* row = values + r * stride;
    if (r % 2 == 0) ahead.step();
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const Wide16 value = load_dims<is_part>(row + v * 16, left);
#pragma GCC unroll 4
      for (int q = 0; q < G; ++q) {
        const __m256 weight = _mm256_broadcast_ss(weights + r * G + q);
        low[q * V + v] = _mm256_fmadd_ps(weight, value.low, low[q * V + v]);
        high[q * V + v] = _mm256_fmadd_ps(weight, value.high, high[q * V + v]);
      }
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < G; ++q) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      _mm256_store_ps(sums + q * padded + v * 16, low[q * V + v]);
      _mm256_store_ps(sums + q * padded + v * 16 + 8, high[q * V + v]);
    }
  }
}

template <class V, int G>
struct Avx2Kernels {
  using Value = V;
  // Rows of one query are read in memory order, at the memory's full rate.
  // Two queries need prefetches: on two cores of an AMD EPYC (Zen 3) they read bf16 at 19 GB/s with
  // them and at 11 without.
  static bool always_prefetches(int /*dim*/) { return G > 1; }
  // Blocks of 16 dims whose sums, for G queries, take half of the registers.
  static constexpr int wide = 4 / G;

  static constexpr bool by_four = G == 4 && sizeof(Value) == 2;

  // Half of a small level-1 cache: with more rows at a time, loops start and end less often.
  static int near_rows_of(int dim) {
    constexpr int bytes = 16384;
    return std::clamp(bytes / (dim * static_cast<int>(sizeof(Value))), near_rows,
                      sizeof(Value) == 2 ? decode_block_rows : near_rows);
  }

  static int score_steps(int rows) {
    return by_four ? (rows + rows_by_four - 1) / rows_by_four : (rows * G + 7) / 8;
  }
  static int accumulate_steps(int rows, int dim) {
    const int whole_blocks = dim / 16;
    return (whole_blocks / wide + whole_blocks % wide + (dim % 16 > 0 ? 1 : 0)) * ((rows + 1) / 2);
  }
  static const float* queries_of(const float* queries, std::int64_t block, int padded) {
    return queries + block * G * padded;
  }
  static void score(const Value* keys, std::int64_t stride, int rows, const float* queries, int dim,
                    float* scores, Ahead& ahead) {
    if constexpr (G == 1) {
      score_in_order_avx2(keys, stride, rows, queries, dim, scores, ahead);
    } else if constexpr (by_four) {
      score_by_four_avx2(keys, stride, rows, queries, dim, scores, ahead);
    } else {
      score_avx2<Value, G>(keys, stride, rows, queries, dim, scores, ahead);
    }
  }
  static void softmax(float* scores, int rows, float scaling, float* maximum, float* weight,
                      float* sums, int padded) {
    online_softmax_avx2<G>(scores, rows, scaling, maximum, weight, sums, padded);
  }
  static void accumulate(const Value* values, std::int64_t stride, int rows, const float* weights,
                         float* sums, int padded, int dim, Ahead& ahead) {
    const int near = G > 1 ? near_rows_of(dim) : rows_in_order<Value>(dim, 1024);
    for (int first = 0; first < rows; first += near) {
      const int count = std::min(near, rows - first);
      const Value* const part = values + first * stride;
      const float* const own = weights + first * G;
      int d = 0;
      for (; d + wide * 16 <= dim; d += wide * 16) {
        accumulate_avx2<Value, G, wide, false>(part + d, stride, count, own, sums + d, padded, 0,
                                               ahead);
      }
      for (; d + 16 <= dim; d += 16) {
        accumulate_avx2<Value, G, 1, false>(part + d, stride, count, own, sums + d, padded, 0,
                                            ahead);
      }
      if (d < dim) {
        accumulate_avx2<Value, G, 1, true>(part + d, stride, count, own, sums + d, padded, dim - d,
                                           ahead);
      }
    }
  }
};

}  // namespace

template <class Value>
void attend_blocks_avx2(int block_queries, const Blocks<Value>& blocks, const RowRun<Value>& run,
                        const RowRun<Value>& next) {
  attend_blocks_of<Avx2Kernels>(block_queries, blocks, run, next);
}

#define KVZAP_INSTANTIATE(Value)                                                           \
  template void attend_blocks_avx2<Value>(int, const Blocks<Value>&, const RowRun<Value>&, \
                                          const RowRun<Value>&);
KVZAP_FOR_EACH_VALUE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap::attention

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)

#endif
