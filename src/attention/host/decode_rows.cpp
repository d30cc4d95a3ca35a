#include "attention/host/decode_rows.hpp"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "attention/host/decode_avx2.hpp"
#include "attention/host/row_blocks.hpp"
#include "attention/host/vector_math.hpp"
#include "attention/softmax.hpp"
#include "base/value_types.hpp"
#include "linalg/host/row_kernels.hpp"

// Within a block of rows that a kernel works on, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace kvzap::attention {
#if KVZAP_X86
namespace {

/// Adds the lanes of two vectors of partial sums and interleaves them. Level by level, 16 vectors
/// become one whose lane i is the sum of vector i.
template <int level>
KVZAP_INLINE_AVX512 __m512 fold(__m512 a, __m512 b) {
  if constexpr (level == 1) {
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  } else if constexpr (level == 2) {
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  } else {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
}

template <int level>
KVZAP_INLINE_AVX512 __m512 fold_all(const __m512* vectors) {
  if constexpr (level == 0) {
    return *vectors;
  } else {
    return fold<level>(fold_all<level - 1>(vectors),
                       fold_all<level - 1>(vectors + (1 << (level - 1))));
  }
}

/// Computes scores of 1 <= rows <= decode_block_rows rows and G query heads. Lane e of vector u
/// belongs to row u * 16 / G + e / G and query e % G. Lanes past the last row hold a score of the
/// last row. queries: [16 dims][G][16].
template <class Ops, int G>
KVZAP_TARGET_AVX512 void score(const typename Ops::Value* keys, std::int64_t stride, int rows,
                               const float* queries, int dim, float* scores, Ahead& ahead) {
  constexpr int unit = 16 / G;
  const int steps = (dim + 15) / 16;
  const std::uint32_t last = 0xffffu >> (steps * 16 - dim);
  for (int first = 0; first < rows; first += unit, scores += 16) {
    const typename Ops::Value* row[unit];
    for (int i = 0; i < unit; ++i) row[i] = keys + std::min(first + i, rows - 1) * stride;
    ahead.step();
    __m512 sums[16];
    for (int e = 0; e < 16; ++e) sums[e] = _mm512_setzero_ps();
    for (int s = 0; s < steps; ++s) {
      const std::uint32_t mask = s + 1 < steps ? 0xffffu : last;
      __m512 query[G];
      for (int q = 0; q < G; ++q) query[q] = _mm512_load_ps(queries + (s * G + q) * 16);
      for (int i = 0; i < unit; ++i) {
        const __m512 key = Ops::load(row[i] + s * 16, mask);
        for (int q = 0; q < G; ++q) {
          sums[i * G + q] = _mm512_fmadd_ps(key, query[q], sums[i * G + q]);
        }
      }
    }
    _mm512_store_ps(scores, fold_all<4>(sums));
  }
}

/// The same for one query, row after row in memory order, which the processor's prefetcher follows.
template <class Ops>
KVZAP_TARGET_AVX512 void score_in_order(const typename Ops::Value* keys, std::int64_t stride,
                                        int rows, const float* query, int dim, float* scores,
                                        Ahead& ahead) {
  const int steps = (dim + 15) / 16;
  const std::uint32_t last = 0xffffu >> (steps * 16 - dim);
  for (int first = 0; first < rows; first += 16, scores += 16) {
    ahead.step();
    __m512 sums[16];
#pragma GCC unroll 1
    for (int i = 0; i < 16; ++i) {
      const typename Ops::Value* row = keys + std::min(first + i, rows - 1) * stride;
      __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
      int s = 0;
      for (; s + 2 < steps; s += 2) {
        even =
            _mm512_fmadd_ps(Ops::load(row + s * 16, 0xffffu), _mm512_load_ps(query + s * 16), even);
        odd = _mm512_fmadd_ps(Ops::load(row + s * 16 + 16, 0xffffu),
                              _mm512_load_ps(query + s * 16 + 16), odd);
      }
      if (s + 1 < steps) {
        even =
            _mm512_fmadd_ps(Ops::load(row + s * 16, 0xffffu), _mm512_load_ps(query + s * 16), even);
        ++s;
      }
      odd = _mm512_fmadd_ps(Ops::load(row + s * 16, last), _mm512_load_ps(query + s * 16), odd);
      sums[i] = _mm512_add_ps(even, odd);
    }
    _mm512_store_ps(scores, fold_all<4>(sums));
  }
}

/// Multiplies one row with G queries, in vectors of 32 dims, and folds the products to one vector.
/// `steps`: vectors of a row, or 0 if `n_steps` gives their number.
template <int G, int steps>
KVZAP_TARGET_AVX512_BF16 inline __attribute__((always_inline)) __m512 score_row_pairs(
    const bfloat16* row, const bfloat16* queries, int n_steps, std::uint32_t last) {
  __m512 sums[G];
  for (int q = 0; q < G; ++q) sums[q] = _mm512_setzero_ps();
  const int count = steps > 0 ? steps : n_steps;
#pragma GCC unroll 4
  for (int s = 0; s < count; ++s) {
    const std::uint32_t mask = s + 1 < count ? 0xffffffffu : last;
    if constexpr (G <= 2) prefetch_in_order(row + s * 32);
    const __m512bh key = (__m512bh)_mm512_maskz_loadu_epi16(mask, row + s * 32);
#pragma GCC unroll 4
    for (int q = 0; q < G; ++q) {
      sums[q] =
          _mm512_dpbf16_ps(sums[q], key, (__m512bh)_mm512_load_si512(queries + (s * G + q) * 32));
    }
  }
  if constexpr (G == 1) return sums[0];
  if constexpr (G == 2) return fold<1>(sums[0], sums[1]);
  if constexpr (G == 4) return fold<2>(fold<1>(sums[0], sums[1]), fold<1>(sums[2], sums[3]));
}

/// Folds rows first .. first + 2^(level - log2 G) - 1 and their queries up to `level`. It works
/// depth first, so that rows are read one after the other in memory order, which the processor's
/// prefetcher follows.
template <int G, int steps, int level>
KVZAP_TARGET_AVX512_BF16 inline __attribute__((always_inline)) __m512 score_unit_pairs(
    const bfloat16* const* rows, const bfloat16* queries, int n_steps, std::uint32_t last) {
  constexpr int row_level = G == 1 ? 0 : G == 2 ? 1 : 2;
  if constexpr (level == row_level) {
    return score_row_pairs<G, steps>(*rows, queries, n_steps, last);
  } else {
    const __m512 low = score_unit_pairs<G, steps, level - 1>(rows, queries, n_steps, last);
    const __m512 high = score_unit_pairs<G, steps, level - 1>(rows + (1 << (level - 1 - row_level)),
                                                              queries, n_steps, last);
    return fold<level>(low, high);
  }
}

template <int G, int steps>
KVZAP_TARGET_AVX512_BF16 void score_pairs_of(const bfloat16* keys, std::int64_t stride, int rows,
                                             const bfloat16* queries, int dim, float* scores,
                                             Ahead& ahead) {
  constexpr int unit = 16 / G;
  const int n_steps = (dim + 31) / 32;
  const std::uint32_t last = 0xffffffffu >> (n_steps * 32 - dim);
  for (int first = 0; first < rows; first += unit, scores += 16) {
    const bfloat16* row[unit];
    for (int i = 0; i < unit; ++i) row[i] = keys + std::min(first + i, rows - 1) * stride;
    ahead.step();
    _mm512_store_ps(scores, score_unit_pairs<G, steps, 4>(row, queries, n_steps, last));
  }
}

/// The same by products of bfloat16 pairs. queries: [32 dims][G][32].
template <int G>
void score_pairs(const bfloat16* keys, std::int64_t stride, int rows, const bfloat16* queries,
                 int dim, float* scores, Ahead& ahead) {
  // Queries of up to 128 dims stay in registers.
  const int steps = (dim + 31) / 32;
  const auto kernel = steps == 4   ? score_pairs_of<G, 4>
                      : steps == 2 ? score_pairs_of<G, 2>
                                   : score_pairs_of<G, 0>;
  kernel(keys, stride, rows, queries, dim, scores, ahead);
}

/// Returns, in each lane, the maximum over the lanes of the same query.
template <int G>
KVZAP_INLINE_AVX512 __m512 max_by_query(__m512 x) {
  x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));
  x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
  if constexpr (G <= 2) x = _mm512_max_ps(x, _mm512_permute_ps(x, 0x4e));
  if constexpr (G == 1) x = _mm512_max_ps(x, _mm512_permute_ps(x, 0xb1));
  return x;
}

/// Updates the running maximum with the scores of `rows` rows and rescales the weight and the sums.
/// Scores past the last row become -infinity. maximum, weight: vectors whose lane e belongs to
/// query e % G (the weight is the sum of its lanes). sums: [G][padded]. Returns the shift to
/// subtract from scores before exp.
template <int G>
KVZAP_INLINE_AVX512 __m512 raise_maximum(float* scores, int rows, float scaling, float* maximum,
                                         float* weight, float* sums, int padded) {
  const int units = (rows * G + 15) / 16;
  const __mmask16 valid = static_cast<__mmask16>(0xffffu >> (units * 16 - rows * G));
  float* const last = scores + (units - 1) * 16;
  _mm512_store_ps(last,
                  _mm512_mask_mov_ps(_mm512_set1_ps(minus_infinity), valid, _mm512_load_ps(last)));
  const __m512 before = _mm512_load_ps(maximum);
  // max returns its second operand if one is NaN, so NaN never becomes the maximum.
  __m512 largest = before;
  for (int u = 0; u < units; ++u) {
    largest = _mm512_max_ps(_mm512_load_ps(scores + u * 16), largest);
  }
  largest = max_by_query<G>(largest);
  const __mmask16 raised = _mm512_cmp_ps_mask(largest, before, _CMP_GT_OQ);
  if (raised) {
    const __m512 difference = _mm512_maskz_sub_ps(raised, before, largest);
    const __m512 factor = exp_nonpositive(_mm512_mul_ps(difference, _mm512_set1_ps(scaling)));
    _mm512_store_ps(maximum, largest);
    _mm512_store_ps(weight, _mm512_mul_ps(_mm512_load_ps(weight), factor));
    alignas(64) float factors[16];
    _mm512_store_ps(factors, factor);
    for (int q = 0; q < G; ++q) {
      const __m512 by = _mm512_set1_ps(factors[q]);
      for (int d = 0; d < padded; d += 16) {
        float* const p = sums + q * padded + d;
        _mm512_store_ps(p, _mm512_mul_ps(_mm512_load_ps(p), by));
      }
    }
  }
  return shift_of(largest);
}

KVZAP_INLINE_AVX512 __m512 exponential(const float* scores, __m512 shift, float scaling) {
  return exp_nonpositive(
      _mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(scores), shift), _mm512_set1_ps(scaling)));
}

/// Replaces scores by exponentials.
template <int G>
KVZAP_TARGET_AVX512 void online_softmax(float* scores, int rows, float scaling, float* maximum,
                                        float* weight, float* sums, int padded) {
  const __m512 shift = raise_maximum<G>(scores, rows, scaling, maximum, weight, sums, padded);
  __m512 total = _mm512_load_ps(weight);
  const int units = (rows * G + 15) / 16;
  for (int u = 0; u < units; ++u) {
    const __m512 p = exponential(scores + u * 16, shift, scaling);
    total = _mm512_add_ps(total, p);
    _mm512_store_ps(scores + u * 16, p);
  }
  _mm512_store_ps(weight, total);
}

/// Replaces scores by exponentials rounded to bfloat16, as pairs of rows: [row / 2][G][row % 2].
template <int G>
KVZAP_TARGET_AVX512_BF16 void online_softmax_pairs(float* scores, int rows, float scaling,
                                                   float* maximum, float* weight, float* sums,
                                                   int padded) {
  const __m512 shift = raise_maximum<G>(scores, rows, scaling, maximum, weight, sums, padded);
  // Powers of 2 need fewer instructions than powers of e. The rounding of exponents adds far less
  // error than the rounding of weights.
  const __m512 log2_scaling = _mm512_set1_ps(scaling * 1.44269504f);
  const __m512 log2_shift = _mm512_mul_ps(shift, log2_scaling);
  const auto weights_of = [&](const float* unit) KVZAP_TARGET_AVX512_BF16 {
    return exp2_of(_mm512_fmsub_ps(_mm512_load_ps(unit), log2_scaling, log2_shift));
  };
  alignas(64) std::uint16_t order[32];
  for (int w = 0; w < 32; ++w) {
    order[w] = static_cast<std::uint16_t>((2 * (w / (2 * G)) + w % 2) * G + w / 2 % G);
  }
  const __m512i permutation = _mm512_load_si512(order);
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  __m512 total = _mm512_load_ps(weight);
  const int units = (rows * G + 15) / 16;
  for (int u = 0; u < units; u += 2) {
    const __m512 low = weights_of(scores + u * 16);
    const __m512 high = u + 1 < units ? weights_of(scores + u * 16 + 16) : _mm512_setzero_ps();
    const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    const __m512i paired = G == 1 ? rounded : _mm512_permutexvar_epi16(permutation, rounded);
    total = _mm512_dpbf16_ps(total, (__m512bh)paired, ones);
    _mm512_store_si512(scores + u * 8, paired);
  }
  _mm512_store_ps(weight, total);
}

/// sums[q][16 * v ..] += weights[row][q] * values[row][16 * v ..] for V vectors of 16 dims.
/// weights: [row][stride of G or more].
template <class Ops, int G, int V>
KVZAP_TARGET_AVX512 void accumulate(const typename Ops::Value* values, std::int64_t stride,
                                    int rows, const float* weights, int weights_stride, float* sums,
                                    int padded, std::uint32_t last_mask, Ahead& ahead) {
  __m512 sum[G * V];
#pragma GCC unroll 16
  for (int q = 0; q < G; ++q) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sum[q * V + v] = _mm512_load_ps(sums + q * padded + v * 16);
  }
  for (int r = 0; r < rows; ++r) {
    const typename Ops::Value* row = values + r * stride;
    ahead.step();
    __m512 value[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      value[v] = Ops::load(row + v * 16, v + 1 < V ? 0xffffu : last_mask);
    }
#pragma GCC unroll 16
    for (int q = 0; q < G; ++q) {
      const __m512 weight = _mm512_set1_ps(weights[r * weights_stride + q]);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v)
        sum[q * V + v] = _mm512_fmadd_ps(weight, value[v], sum[q * V + v]);
    }
  }
#pragma GCC unroll 16
  for (int q = 0; q < G; ++q) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) _mm512_store_ps(sums + q * padded + v * 16, sum[q * V + v]);
  }
}

/// The same by products of pairs of rows, for V vectors of 32 dims. `sums` has the order in which
/// unpacking leaves them, see lane_of_dim. `later`: number of vectors behind these that are
/// prefetched, since the next call must find them in the level-1 cache. weights: [row / 2][G][row %
/// 2].
template <int G, int V>
KVZAP_TARGET_AVX512_BF16 void accumulate_pairs(const bfloat16* values, std::int64_t stride,
                                               int rows, const std::uint32_t* weights, float* sums,
                                               int padded, std::uint32_t last_mask, int later,
                                               Ahead& ahead) {
  __m512 sum[G * 2 * V];
#pragma GCC unroll 16
  for (int q = 0; q < G; ++q) {
#pragma GCC unroll 16
    for (int v = 0; v < 2 * V; ++v) sum[q * 2 * V + v] = _mm512_load_ps(sums + q * padded + v * 16);
  }
  for (int r = 0; r < rows; r += 2) {
    const bfloat16* even = values + r * stride;
    // The pair of an odd last row has the weight 0. It must not be multiplied by memory behind the
    // row.
    const bfloat16* odd = r + 1 < rows ? even + stride : even;
    ahead.step();
    __m512bh weight[G];
#pragma GCC unroll 16
    for (int q = 0; q < G; ++q) {
      weight[q] = (__m512bh)_mm512_set1_epi32(static_cast<int>(weights[r / 2 * G + q]));
    }
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      const std::uint32_t mask = v + 1 < V ? 0xffffffffu : last_mask;
      if constexpr (G <= 2) {
        prefetch_in_order(even + v * 32);
        prefetch_in_order(odd + v * 32);
      }
      const __m512i a = _mm512_maskz_loadu_epi16(mask, even + v * 32);
      const __m512i b = _mm512_maskz_loadu_epi16(mask, odd + v * 32);
      const auto low = (__m512bh)_mm512_unpacklo_epi16(a, b);
      const auto high = (__m512bh)_mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 16
      for (int q = 0; q < G; ++q) {
        __m512* const own = sum + (q * V + v) * 2;
        own[0] = _mm512_dpbf16_ps(own[0], weight[q], low);
        own[1] = _mm512_dpbf16_ps(own[1], weight[q], high);
      }
    }
    for (int v = V; v < V + later; ++v) {
      if constexpr (G <= 2) {
        prefetch_in_order(even + v * 32);
        prefetch_in_order(odd + v * 32);
      }
      __builtin_prefetch(reinterpret_cast<const char*>(even + v * 32), 0, 3);
      __builtin_prefetch(reinterpret_cast<const char*>(odd + v * 32), 0, 3);
    }
  }
#pragma GCC unroll 16
  for (int q = 0; q < G; ++q) {
#pragma GCC unroll 16
    for (int v = 0; v < 2 * V; ++v) _mm512_store_ps(sums + q * padded + v * 16, sum[q * 2 * V + v]);
  }
}

/// Returns the lane of dim d in a block of 32 sums: unpacking splits each 8 neighbours in two.
constexpr int lane_of_dim(int d) { return d / 4 % 2 * 16 + d / 8 * 4 + d % 4; }

/// Calls accumulate for all queries and vectors of a row. Reads whole rows at a time, for as many
/// queries as fit in registers: parts of rows are not read at the memory's full rate. For one
/// query, which waits for nothing else, see rows_in_order.
template <class Ops, int G>
void accumulate_all(const typename Ops::Value* values, std::int64_t stride, int rows,
                    const float* weights, float* sums, int padded, int dim, Ahead& ahead) {
  constexpr int queries = G == 4 ? 2 : G;  // NOLINT(bugprone-branch-clone): G may be 2
  constexpr int wide = G == 1 ? 4 : 8;
  const int vectors = (dim + 15) / 16;
  const std::uint32_t last = 0xffffu >> (vectors * 16 - dim);
  const int near = G > 1 ? near_rows : rows_in_order<typename Ops::Value>(dim, 512);
  for (int first = 0; first < rows; first += near) {
    const int count = std::min(near, rows - first);
    for (int v = 0; v < vectors;) {
      const int taken = vectors - v >= wide ? wide : vectors - v >= 4 ? 4 : 1;
      const auto kernel = taken == wide ? accumulate<Ops, queries, wide>
                          : taken == 4  ? accumulate<Ops, queries, 4>
                                        : accumulate<Ops, queries, 1>;
      for (int q = 0; q < G; q += queries) {
        kernel(values + first * stride + v * 16, stride, count, weights + first * G + q, G,
               sums + q * padded + v * 16, padded, v + taken == vectors ? last : 0xffffu, ahead);
      }
      v += taken;
    }
  }
}

// Vectors of 32 dims whose sums, for all G queries at once, fit in registers. Rows that are read in
// parts are then unpacked once, and are still read from memory as a whole.
template <int G>
constexpr int pair_vectors = G == 4 ? 3 : 4;

/// The same by accumulate_pairs.
template <int G>
void accumulate_all_pairs(const bfloat16* values, std::int64_t stride, int rows,
                          const float* weights, float* sums, int padded, int dim, Ahead& ahead) {
  const int vectors = (dim + 31) / 32;
  const std::uint32_t last = 0xffffffffu >> (vectors * 32 - dim);
  for (int first = 0; first < rows; first += near_rows) {
    const int count = std::min(near_rows, rows - first);
    const auto* pairs = reinterpret_cast<const std::uint32_t*>(weights) + first / 2 * G;
    for (int v = 0; v < vectors;) {
      const int taken = std::min(vectors - v, pair_vectors<G>);
      const auto kernel = taken == pair_vectors<G> ? accumulate_pairs<G, pair_vectors<G>>
                          : taken == 3             ? accumulate_pairs<G, 3>
                          : taken == 2             ? accumulate_pairs<G, 2>
                                                   : accumulate_pairs<G, 1>;
      kernel(values + first * stride + v * 32, stride, count, pairs, sums + v * 32, padded,
             v + taken == vectors ? last : 0xffffffffu, v == 0 ? vectors - taken : 0, ahead);
      v += taken;
    }
  }
}

template <class Value>
using OpsOf =
    std::conditional_t<std::is_same_v<Value, float>, FloatOps,
                       std::conditional_t<std::is_same_v<Value, half>, HalfOps, WideBfloatOps>>;

template <class V, int G>
struct VectorKernels {
  using Value = V;
  using Ops = OpsOf<Value>;
  // Rows of one query are read in memory order, at the memory's full rate.
  static bool always_prefetches(int /*dim*/) { return G > 1; }

  static int score_steps(int rows) { return (rows * G + 15) / 16; }
  static int accumulate_steps(int rows, int /*dim*/) { return (G == 4 ? 2 : 1) * rows; }

  static const float* queries_of(const float* queries, std::int64_t block, int padded) {
    return queries + block * G * padded;
  }
  static void score(const Value* keys, std::int64_t stride, int rows, const float* queries, int dim,
                    float* scores, Ahead& ahead) {
    if constexpr (G == 1) {
      score_in_order<Ops>(keys, stride, rows, queries, dim, scores, ahead);
    } else {
      attention::score<Ops, G>(keys, stride, rows, queries, dim, scores, ahead);
    }
  }
  static void softmax(float* scores, int rows, float scaling, float* maximum, float* weight,
                      float* sums, int padded) {
    online_softmax<G>(scores, rows, scaling, maximum, weight, sums, padded);
  }
  static void accumulate(const Value* values, std::int64_t stride, int rows, const float* weights,
                         float* sums, int padded, int dim, Ahead& ahead) {
    accumulate_all<Ops, G>(values, stride, rows, weights, sums, padded, dim, ahead);
  }
};

template <int G>
struct PairKernels {
  using Value = bfloat16;
  // Rows that are read in several parts because the registers have no room for all queries.
  static bool always_prefetches(int dim) { return dim > 128; }

  static int score_steps(int rows) { return (rows * G + 15) / 16; }
  static int accumulate_steps(int rows, int dim) {
    const int vectors = (dim + 31) / 32;
    return (vectors + pair_vectors<G> - 1) / pair_vectors<G> * ((rows + 1) / 2);
  }

  static const bfloat16* queries_of(const float* queries, std::int64_t block, int padded) {
    return reinterpret_cast<const bfloat16*>(queries) + block * G * padded;
  }
  static void score(const bfloat16* keys, std::int64_t stride, int rows, const bfloat16* queries,
                    int dim, float* scores, Ahead& ahead) {
    score_pairs<G>(keys, stride, rows, queries, dim, scores, ahead);
  }
  static void softmax(float* scores, int rows, float scaling, float* maximum, float* weight,
                      float* sums, int padded) {
    online_softmax_pairs<G>(scores, rows, scaling, maximum, weight, sums, padded);
  }
  static void accumulate(const bfloat16* values, std::int64_t stride, int rows,
                         const float* weights, float* sums, int padded, int dim, Ahead& ahead) {
    accumulate_all_pairs<G>(values, stride, rows, weights, sums, padded, dim, ahead);
  }
};

template <class Value, int G>
using VectorKernelsOf = VectorKernels<Value, G>;
template <class Value, int G>
using PairKernelsOf = PairKernels<G>;

}  // namespace
#endif

template <class Value>
std::int64_t RowAttention<Value>::scratch_size(int group, int dim) {
  const std::int64_t queries = whole(group, 4);
  const std::int64_t padded = whole(dim, 32);
  // Space for queries and sums, scores, maximum and weight, and copies of keys and values.
  return 2 * queries * padded + queries * decode_block_rows + 2 * whole(queries, 16) * 4 +
         2 * whole(
                 decode_block_rows * static_cast<std::int64_t>(dim) * sizeof(Value) / sizeof(float),
                 16);
}

template <class Value>
RowAttention<Value>::RowAttention(int group, int dim, float* scratch, float soft_cap)
    : m_group(group),
      m_dim(dim),
      m_scaling(1.0f / std::sqrt(static_cast<float>(dim))),
      m_soft_cap(soft_cap / m_scaling) {
#if KVZAP_X86
  const base::SimdLevel level = base::simd_level();
  if (level >= base::SimdLevel::avx2) {
    m_kernels = level < base::SimdLevel::avx512 ? Kernels::avx2
                : std::is_same_v<Value, bfloat16> && level >= base::SimdLevel::avx512_bf16
                    ? Kernels::pairs
                    : Kernels::vectors;
  }
#endif
  const bool blocked = m_kernels != Kernels::portable;
  m_block_queries = !blocked ? group : group <= 2 ? group : 4;
  m_blocks = (group + m_block_queries - 1) / m_block_queries;
  m_padded_dim = blocked ? static_cast<int>(whole(dim, 32)) : dim;
  const std::int64_t queries = whole(group, 4);
  const std::int64_t padded = whole(dim, 32);
  m_queries = scratch;
  m_sums = m_queries + queries * padded;
  m_scores = m_sums + queries * padded;
  m_maximum = m_scores + queries * decode_block_rows;
  m_weight = m_maximum + whole(queries, 16) * 4;
  m_rows = reinterpret_cast<Value*>(m_weight + whole(queries, 16) * 4);
}

template <class Value>
void RowAttention<Value>::begin(const float* queries, std::int64_t head_stride,
                                std::int64_t dim_stride) {
  const int padded_group = m_blocks * m_block_queries;
  std::fill_n(m_sums, std::int64_t{padded_group} * m_padded_dim, 0.0f);
  const int lanes = m_kernels == Kernels::portable ? m_group : m_blocks * block_lanes;
  std::fill_n(m_maximum, lanes, minus_infinity);
  std::fill_n(m_weight, lanes, 0.0f);
  const int step = m_kernels == Kernels::portable ? m_padded_dim
                   : m_kernels == Kernels::pairs  ? 32
                                                  : 16;
  for (int head = 0; head < padded_group; ++head) {
    const std::int64_t block = std::int64_t{head / m_block_queries} * m_padded_dim;
    for (int d = 0; d < m_padded_dim; d += step) {
      const int count = head < m_group ? std::clamp(m_dim - d, 0, step) : 0;
      const float* const source = queries + head * head_stride + d * dim_stride;
      const auto copy = [&](float* target) {
        for (int i = 0; i < count; ++i) target[i] = source[i * dim_stride];
        std::fill(target + count, target + step, 0.0f);
      };
      const std::int64_t at = (block + d) * m_block_queries + head % m_block_queries * step;
      if (m_kernels == Kernels::pairs || m_kernels == Kernels::avx2) {
        float dims[32];
        copy(dims);
        if (m_kernels == Kernels::pairs) {
          linalg::narrow(dims, reinterpret_cast<bfloat16*>(m_queries) + at, step);
        } else {
          for (int i = 0; i < 16; ++i) m_queries[at + avx2_lane_of_dim<Value>(i)] = dims[i];
        }
      } else {
        copy(m_queries + at);
      }
    }
  }
}

template <class Value>
void RowAttention<Value>::attend_portably(const RowRun<Value>& run) {
  for (std::int64_t begin = 0; begin < run.rows; begin += decode_block_rows) {
    const int rows = static_cast<int>(std::min<std::int64_t>(decode_block_rows, run.rows - begin));
    linalg::score_rows(run.keys + begin * run.row_stride, run.row_stride, run.dim_stride, rows,
                       m_queries, m_group, m_dim, m_scores, decode_block_rows);
    for (int q = 0; q < m_group; ++q) {
      float* row = m_scores + q * decode_block_rows;
      if (m_soft_cap > 0) linalg::soft_cap(row, rows, m_soft_cap);
      const float maximum = std::max(m_maximum[q], linalg::max_of(row, rows));
      if (maximum > m_maximum[q]) {
        const float factor = std::exp((m_maximum[q] - maximum) * m_scaling);
        m_weight[q] *= factor;
        linalg::scale(m_sums + q * m_dim, m_dim, factor);
        m_maximum[q] = maximum;
      }
      m_weight[q] += linalg::exp_shifted(row, rows, shift_of(maximum), m_scaling);
    }
    linalg::accumulate_rows(run.values + begin * run.row_stride, run.row_stride, run.dim_stride,
                            rows, m_scores, decode_block_rows, m_group, m_dim, m_sums);
  }
}

template <class Value>
void RowAttention<Value>::attend(const RowRun<Value>& run,
                                 [[maybe_unused]] const RowRun<Value>& next) {
  if (m_kernels == Kernels::portable) return attend_portably(run);
#if KVZAP_X86
  if (run.dim_stride != 1) {
    Value* const keys = m_rows;
    Value* const values = m_rows + std::int64_t{decode_block_rows} * m_dim;
    for (std::int64_t begin = 0; begin < run.rows; begin += decode_block_rows) {
      const std::int64_t rows = std::min<std::int64_t>(decode_block_rows, run.rows - begin);
      for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t row = (begin + r) * run.row_stride;
        for (int d = 0; d < m_dim; ++d) {
          keys[r * m_dim + d] = run.keys[row + d * run.dim_stride];
          values[r * m_dim + d] = run.values[row + d * run.dim_stride];
        }
      }
      const RowRun<Value> copied{keys, values, rows, m_dim, 1};
      attend(copied, copied);
    }
    return;
  }
  const Blocks<Value> blocks{m_blocks,  m_dim,    m_padded_dim, m_scaling, m_soft_cap,
                             m_queries, m_scores, m_maximum,    m_weight,  m_sums};
  const RowRun<Value>& ahead = next.keys && next.dim_stride == 1 ? next : run;
  if constexpr (std::is_same_v<Value, bfloat16>) {
    if (m_kernels == Kernels::pairs) {
      return attend_blocks_of<PairKernelsOf>(m_block_queries, blocks, run, ahead);
    }
  }
  if (m_kernels == Kernels::avx2) {
    return attend_blocks_avx2(m_block_queries, blocks, run, ahead);
  }
  attend_blocks_of<VectorKernelsOf>(m_block_queries, blocks, run, ahead);
#endif
}

template <class Value>
void RowAttention<Value>::finish(float* maximum, float* weight, float* sums) const {
  if (m_kernels == Kernels::portable) {
    std::copy_n(m_maximum, m_group, maximum);
    std::copy_n(m_weight, m_group, weight);
    std::copy_n(m_sums, std::int64_t{m_group} * m_dim, sums);
    return;
  }
#if KVZAP_X86
  for (int head = 0; head < m_group; ++head) {
    const int lanes = head / m_block_queries * block_lanes;
    const int q = head % m_block_queries;
    maximum[head] = m_maximum[lanes + q];
    float total = 0;
    for (int lane = q; lane < block_lanes; lane += m_block_queries) total += m_weight[lanes + lane];
    weight[head] = total;
    const float* own = m_sums + std::int64_t{head} * m_padded_dim;
    float* const target = sums + std::int64_t{head} * m_dim;
    if (m_kernels == Kernels::vectors) {
      std::copy_n(own, m_dim, target);
      continue;
    }
    for (int d = 0; d < m_dim; d += 32) {
      float dims[32];
      for (int i = 0; i < 32; ++i) {
        dims[i] =
            own[d + (m_kernels == Kernels::pairs ? lane_of_dim(i)
                                                 : i / 16 * 16 + avx2_lane_of_dim<Value>(i % 16))];
      }
      std::copy_n(dims, std::min(32, m_dim - d), target + d);
    }
  }
#endif
}

#define KVZAP_INSTANTIATE(Value) template class RowAttention<Value>;
KVZAP_FOR_EACH_VALUE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap::attention

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
