#include "linalg/host/quantised_row_products.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/byte_products.hpp"
#include "base/simd.hpp"
#include "linalg/pack_row.hpp"
#if KVZAP_X86
#include <immintrin.h>
#endif

// Within a block of rows that a kernel works on, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace kvzap::linalg {
namespace {

// Kernels take levels with 128 added, as q8 stores them: unsigned bytes become 16-bit numbers by
// unpacking them with zeros, which takes half the instructions of sign extension.
constexpr int level_offset = 128;

// Rows at a time. Sums of their weighted levels fit 32 bits, also with 128 added to each level.
constexpr int most_rows = 64;

void score_plainly(const QuantisedRows& keys, std::int64_t first, int rows,
                   const QuantisedQueries& queries, float* scores, int stride) {
  const int dim = keys.dim;
  const int width = packed_width(keys.type, dim);
  constexpr int most = 8;  // queries that share the reading of a level
  for (int r = 0; r < rows; ++r) {
    const float scale = keys.scales[first + r];
    for (int begin = 0; begin < queries.count; begin += most) {
      const int count = std::min(most, queries.count - begin);
      const std::int16_t* const numbers = queries.numbers + begin * width;
      std::int32_t sums[most] = {};
      for (int d = 0; d < dim; ++d) {
        const int level = keys.level_at(first + r, d);
        const int place = query_place(keys.type, dim, d);
        for (int q = 0; q < count; ++q) sums[q] += level * numbers[q * width + place];
      }
      for (int q = 0; q < count; ++q) {
        scores[(begin + q) * stride + r] =
            static_cast<float>(sums[q]) * (scale * queries.scales[begin + q]);
      }
    }
  }
}

void accumulate_plainly(const QuantisedRows& values, std::int64_t first, int rows,
                        const float* weights, int stride, int queries, float* sums) {
  const int dim = values.dim;
  const int width = packed_width(values.type, dim);
  for (int r = 0; r < rows; ++r) {
    for (int d = 0; d < dim; ++d) {
      const auto level = static_cast<float>(values.level_at(first + r, d));
      const int place = quantised_place(values.type, dim, d);
      for (int q = 0; q < queries; ++q) {
        sums[q * width + place] += weights[q * stride + r] * level;
      }
    }
  }
}

#if KVZAP_X86

#define KVZAP_INLINE_HERE KVZAP_TARGET_AVX2 static inline __attribute__((always_inline))

// Asks for the lines of some bytes in the level-2 cache, the same number in each of `steps` steps.
class Prefetch {
 public:
  KVZAP_INLINE_HERE Prefetch of(const AheadBytes& ahead, int steps) {
    Prefetch prefetch;
    prefetch.m_next = ahead.begin;
    prefetch.m_end = ahead.begin + ahead.bytes;
    prefetch.m_lines = static_cast<int>((ahead.bytes + 64 * steps - 1) / (64 * steps));
    return prefetch;
  }
  // Of no target, so that it is inlined into kernels of any.
  inline __attribute__((always_inline)) void step() {
    for (int i = 0; i < m_lines && m_next < m_end; ++i, m_next += 64) {
      __builtin_prefetch(m_next, 0, 2);
    }
  }

 private:
  const std::uint8_t* m_next = nullptr;
  const std::uint8_t* m_end = nullptr;
  int m_lines = 0;
};

// What the codes of a part of a row are: levels, numbers of levels in the lower or the upper halves
// of bytes, or units of 32 dimensions of 3 or 2 bits.
enum class Codes { levels, lower, upper, threes, twos };

// Returns the part of a row that has its first dimensions.
constexpr Codes first_part(RowType type) {
  return type == RowType::q8   ? Codes::levels
         : type == RowType::q4 ? Codes::lower
         : type == RowType::q3 ? Codes::threes
                               : Codes::twos;
}

struct LevelTable {
  alignas(16) std::uint8_t levels[32];
};

// Returns the levels of a type by their numbers, with level_offset added.
constexpr LevelTable level_table(RowType type) {
  LevelTable table{};
  const int count = type == RowType::q4 ? 16 : RowTrellis::of(type).count();
  for (int n = 0; n < count; ++n) {
    const int level = type == RowType::q4 ? QuantisedRows::level(n) : RowTrellis::of(type).level(n);
    table.levels[n] = static_cast<std::uint8_t>(level + level_offset);
  }
  return table;
}
template <RowType type>
constexpr LevelTable table_of = level_table(type);

// Returns the levels of numbers from `first` on.
template <RowType type, int first = 0>
KVZAP_INLINE_HERE __m128i offset_table() {
  return _mm_load_si128(reinterpret_cast<const __m128i*>(table_of<type>.levels + first));
}

KVZAP_INLINE_HERE __m256i load_codes(const std::uint8_t* codes) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
}

// Returns the first bytes of a unit of codes of 2 or 3 bits in all its 64-bit lanes.
KVZAP_INLINE_HERE __m256i load_lower_bits(const std::uint8_t* unit) {
  std::int64_t bits = 0;
  std::memcpy(&bits, unit, sizeof(bits));
  return _mm256_set1_epi64x(bits);
}

// Returns the levels of a unit of codes of 2 or 3 bits.
template <RowType type>
KVZAP_INLINE_HERE __m256i unit_levels(const std::uint8_t* unit) {
  const __m256i shifted = _mm256_srlv_epi64(load_lower_bits(unit), _mm256_setr_epi64x(0, 2, 4, 6));
  const __m256i numbers = _mm256_and_si256(shifted, _mm256_set1_epi8(15));
  const __m256i levels =
      _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(offset_table<type>()), numbers);
  if constexpr (type == RowType::q2) return levels;
  std::int32_t third = 0;
  std::memcpy(&third, unit + 8, sizeof(third));
  const __m256i places =
      _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(third), places);
  const __m256i bit = _mm256_set1_epi64x(static_cast<std::int64_t>(0x8040201008040201u));
  const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
  const __m256i others =
      _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(offset_table<type, 16>()), numbers);
  return _mm256_blendv_epi8(levels, others, is_set);
}

// Returns 32 levels of a part of a row, from place `at` on, with level_offset added.
template <Codes part>
KVZAP_INLINE_HERE __m256i offset_levels(const std::uint8_t* codes, int at) {
  if constexpr (part == Codes::levels) {
    return load_codes(codes + at);
  } else if constexpr (part == Codes::twos || part == Codes::threes) {
    constexpr RowType type = part == Codes::twos ? RowType::q2 : RowType::q3;
    return unit_levels<type>(codes + at / 32 * QuantisedRows::unit_bytes(type));
  } else {
    const __m256i own = load_codes(codes + at);
    const __m256i numbers = part == Codes::upper ? _mm256_srli_epi16(own, 4) : own;
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(offset_table<RowType::q4>()),
                               _mm256_and_si256(numbers, _mm256_set1_epi8(15)));
  }
}

// sum += addend. GCC 12 would put some sums into other registers, and run out of them: on a core of
// an AMD EPYC (Zen 3) four queries then take 12.7 ns and not 11.2 for a row of 4 bits, head_dim
// 128.
KVZAP_INLINE_HERE void add_in_place(__m256i& sum, __m256i addend) {
  asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(addend));
}

// Adds the lanes of 8 vectors: lane i of the result is the sum of vector i.
KVZAP_INLINE_HERE __m256i add_lanes(const __m256i* v) {
  const __m256i a = _mm256_hadd_epi32(v[0], v[1]), b = _mm256_hadd_epi32(v[2], v[3]);
  const __m256i c = _mm256_hadd_epi32(v[4], v[5]), d = _mm256_hadd_epi32(v[6], v[7]);
  const __m256i low = _mm256_hadd_epi32(a, b), high = _mm256_hadd_epi32(c, d);
  return _mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20),
                          _mm256_permute2x128_si256(low, high, 0x31));
}

// Multiplies 32 levels of each of `unit` rows with 32 numbers of G queries. sums: (query, row).
template <int G, int unit, Codes part>
KVZAP_INLINE_HERE void multiply(const std::uint8_t* const* rows, int at,
                                const std::int16_t* numbers, int width, __m256i* sums) {
  __m256i low[G], high[G];
#pragma GCC unroll 4
  for (int q = 0; q < G; ++q) {
    low[q] = _mm256_load_si256(reinterpret_cast<const __m256i*>(numbers + q * width));
    high[q] = _mm256_load_si256(reinterpret_cast<const __m256i*>(numbers + q * width + 16));
  }
#pragma GCC unroll 8
  for (int i = 0; i < unit; ++i) {
    const __m256i levels = offset_levels<part>(rows[i], at);
    const __m256i first = _mm256_unpacklo_epi8(levels, _mm256_setzero_si256());
    const __m256i second = _mm256_unpackhi_epi8(levels, _mm256_setzero_si256());
#pragma GCC unroll 4
    for (int q = 0; q < G; ++q) {
      __m256i& sum = sums[q * unit + i];
      add_in_place(sum, _mm256_madd_epi16(first, low[q]));
      add_in_place(sum, _mm256_madd_epi16(second, high[q]));
    }
  }
}

// Rows that G queries are multiplied with at once: their products fill a vector, or three quarters.
template <int G>
constexpr int rows_of_unit = G == 3 ? 2 : 8 / G;

// Writes the products of a unit of rows, (query, row), as whole numbers.
template <int G>
KVZAP_INLINE_HERE void store_products(__m256i products, float* scores, int stride) {
  const auto at = [&](int q) { return scores + std::int64_t{q} * stride; };
  const __m128i low = _mm256_castsi256_si128(products);
  const __m128i high = _mm256_extracti128_si256(products, 1);
  if constexpr (G == 1) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(scores), products);
  } else if constexpr (G == 2) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at(0)), low);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at(1)), high);
  } else {
    _mm_storel_pi(reinterpret_cast<__m64*>(at(0)), _mm_castsi128_ps(low));
    _mm_storeh_pi(reinterpret_cast<__m64*>(at(1)), _mm_castsi128_ps(low));
    _mm_storel_pi(reinterpret_cast<__m64*>(at(2)), _mm_castsi128_ps(high));
    if constexpr (G == 4) {
      _mm_storeh_pi(reinterpret_cast<__m64*>(at(3)), _mm_castsi128_ps(high));
    }
  }
}

// Turns the products of a query into scores, 8 rows at a time.
KVZAP_INLINE_HERE void scale_products(const float* row_scales, float scale, int rows,
                                      float* scores) {
  const __m256 by = _mm256_set1_ps(scale);
  for (int r = 0; r < rows; r += 8) {
    const __m256i products = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scores + r));
    const __m256 both = _mm256_mul_ps(_mm256_loadu_ps(row_scales + r), by);
    _mm256_storeu_ps(scores + r, _mm256_mul_ps(_mm256_cvtepi32_ps(products), both));
  }
}

// The rows first … first + count - 1 of quantised rows, and their scales.
struct SomeRows {
  const QuantisedRows& all;
  std::int64_t first;
  int count;
  const float* scales;
};

// Products of G queries as whole numbers, a unit of rows at a time; `scores` has space for whole
// eights of rows.
template <int G, RowType type>
KVZAP_TARGET_AVX2 void score_avx2(const SomeRows& some, const QuantisedQueries& queries,
                                  float* scores, int stride, const AheadBytes& ahead) {
  const QuantisedRows& keys = some.all;
  const int rows = some.count;
  constexpr int unit = rows_of_unit<G>;
  const int width = packed_width(type, keys.dim);
  const int part = type == RowType::q4 ? width / 2 : width;
  const std::int64_t bytes = QuantisedRows::code_bytes(type, keys.dim);
  // Sums begin with what levels have too much.
  __m256i begin[G];
#pragma GCC unroll 4
  for (int q = 0; q < G; ++q) {
    begin[q] = _mm256_setr_epi32(-queries.sums[q], 0, 0, 0, 0, 0, 0, 0);
  }
  Prefetch prefetch = Prefetch::of(ahead, (rows + unit - 1) / unit);
  for (int r = 0; r < rows; r += unit) {
    prefetch.step();
    const std::uint8_t* row[unit];
#pragma GCC unroll 8
    for (int i = 0; i < unit; ++i)
      row[i] = keys.codes + (some.first + std::min(r + i, rows - 1)) * bytes;
    __m256i sums[8];
#pragma GCC unroll 8
    for (int e = 0; e < 8; ++e) {
      sums[e] = e < G * unit ? begin[e / unit] : _mm256_setzero_si256();
    }
    for (int j = 0; j < part; j += 32) {
      const std::int16_t* const numbers = queries.numbers + j;
      multiply<G, unit, first_part(type)>(row, j, numbers, width, sums);
      if constexpr (type == RowType::q4) {
        multiply<G, unit, Codes::upper>(row, j, numbers + part, width, sums);
      }
    }
    store_products<G>(add_lanes(sums), scores + r, stride);
  }
}

// Adds whole numbers less `offset`, times `scale`, to 16 floats: dims 0 … 3 and 16 … 19 of `first`,
// 4 … 7 and 20 … 23 of `second`.
KVZAP_INLINE_HERE void add_scaled(__m256i first, __m256i second, std::int32_t offset, float scale,
                                  float* target) {
  const __m256i less = _mm256_set1_epi32(offset);
  const __m256 by = _mm256_set1_ps(scale);
  const auto add = [&](__m256i whole, float* to) KVZAP_TARGET_AVX2 {
    const __m256 found = _mm256_cvtepi32_ps(_mm256_sub_epi32(whole, less));
    _mm256_store_ps(to, _mm256_fmadd_ps(by, found, _mm256_load_ps(to)));
  };
  add(_mm256_permute2x128_si256(first, second, 0x20), target);
  add(_mm256_permute2x128_si256(first, second, 0x31), target + 16);
}

// Weights of rows, rounded to whole numbers.
template <int G>
struct RoundedWeights {
  alignas(32) std::int16_t numbers[G][most_rows];  // (query, row)
  std::int32_t offsets[G];  // (query): level_offset times the sum of its numbers
  float scales[G];

  // Returns the numbers of rows `row`, which is even, and `row` + 1 in all lanes.
  KVZAP_INLINE_HERE __m256i pair(const RoundedWeights& weights, int q, int row) {
    std::int32_t both = 0;
    std::memcpy(&both, &weights.numbers[q][row], sizeof(both));
    return _mm256_set1_epi32(both);
  }
};

// Adds weighted levels of 32 dims from place `at` on, or of 16 of them: of `halves` halves from
// `first_half` on. A half has the dims of the unpacked lower, or upper, halves of lanes.
template <int G, Codes part, int first_half, int halves>
KVZAP_INLINE_HERE Prefetch accumulate(RowSpan<const std::uint8_t> rows, int at,
                                      const RoundedWeights<G>& weights, float* sums, int width,
                                      Prefetch prefetch) {
  const auto count = static_cast<int>(rows.count);
  const std::uint8_t* codes = rows.data;
  constexpr int vectors = 2 * halves;
  __m256i sum[vectors * G];
#pragma GCC unroll 12
  for (int e = 0; e < vectors * G; ++e) sum[e] = _mm256_setzero_si256();
  for (int r = 0; r < count; r += 2, codes += 2 * rows.stride) {
    prefetch.step();
    const std::int64_t to_second = r + 1 < count ? rows.stride : 0;  // a missing row weighs 0
    const __m256i a = offset_levels<part>(codes, at);
    const __m256i b = offset_levels<part>(codes + to_second, at);
    __m256i pairs[vectors];
#pragma GCC unroll 2
    for (int h = 0; h < halves; ++h) {
      const __m256i both =
          first_half + h == 0 ? _mm256_unpacklo_epi8(a, b) : _mm256_unpackhi_epi8(a, b);
      pairs[2 * h] = _mm256_unpacklo_epi8(both, _mm256_setzero_si256());
      pairs[2 * h + 1] = _mm256_unpackhi_epi8(both, _mm256_setzero_si256());
    }
#pragma GCC unroll 4
    for (int q = 0; q < G; ++q) {
      const __m256i weight = RoundedWeights<G>::pair(weights, q, r);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        __m256i& own = sum[q * vectors + v];
        own = _mm256_add_epi32(own, _mm256_madd_epi16(pairs[v], weight));
      }
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < G; ++q) {
#pragma GCC unroll 2
    for (int h = 0; h < halves; ++h) {
      const __m256i* const own = sum + q * vectors + 2 * h;
      add_scaled(own[0], own[1], weights.offsets[q], weights.scales[q],
                 sums + q * width + 8 * (first_half + h));
    }
  }
  return prefetch;
}

// Adds weighted levels of all dims of one part of the codes. Asks for memory evenly meanwhile: each
// core has few requests open at a time, and waits if there are more.
template <int G, Codes part>
KVZAP_TARGET_AVX2 void accumulate_avx2(RowSpan<const std::uint8_t> codes,
                                       const RoundedWeights<G>& weights, float* sums, int width,
                                       int dims, const AheadBytes& ahead) {
  const auto rows = static_cast<int>(codes.count);
  constexpr int passes = G <= 3 ? 1 : 2;  // sums of all 32 dims do not fit the registers
  Prefetch prefetch = Prefetch::of(ahead, passes * (dims / 32) * ((rows + 1) / 2));
  for (int j = 0; j < dims; j += 32) {
    const auto add = [&](auto half) KVZAP_TARGET_AVX2 {
      prefetch = accumulate<G, part, decltype(half)::value, 2 / passes>(codes, j, weights, sums + j,
                                                                        width, prefetch);
    };
    add(std::integral_constant<int, 0>());
    if constexpr (passes == 2) add(std::integral_constant<int, 1>());
  }
}

// Writes the first `count` of 16 levels times `scale`. The levels have level_offset added.
KVZAP_INLINE_HERE void store_levels(__m128i offset, __m256 scale, int count, float* target) {
  const __m128i levels = _mm_xor_si128(offset, _mm_set1_epi8(static_cast<char>(level_offset)));
  alignas(32) float values[16];
  float* const to = count >= 16 ? target : values;
  const __m256i low = _mm256_cvtepi8_epi32(levels);
  const __m256i high = _mm256_cvtepi8_epi32(_mm_srli_si128(levels, 8));
  _mm256_storeu_ps(to, _mm256_mul_ps(scale, _mm256_cvtepi32_ps(low)));
  _mm256_storeu_ps(to + 8, _mm256_mul_ps(scale, _mm256_cvtepi32_ps(high)));
  if (count < 16) std::copy_n(values, count, target);
}

// Writes `count` dims of a part of a row times `scale`.
template <Codes part>
KVZAP_INLINE_HERE void widen_part(const std::uint8_t* codes, __m256 scale, int count,
                                  float* target) {
  for (int j = 0; j < count; j += 32) {
    const __m256i levels = offset_levels<part>(codes, j);
    store_levels(_mm256_castsi256_si128(levels), scale, count - j, target + j);
    if (count - j > 16) {
      store_levels(_mm256_extracti128_si256(levels, 1), scale, count - j - 16, target + j + 16);
    }
  }
}

template <RowType type>
KVZAP_TARGET_AVX2 void widen_avx2(const QuantisedRows& rows, std::int64_t row, float* target) {
  const int dim = rows.dim;
  const std::uint8_t* const codes = rows.codes + row * QuantisedRows::code_bytes(type, dim);
  const __m256 scale = _mm256_set1_ps(rows.scales[row]);
  const int part = type == RowType::q4 ? (dim + 1) / 2 : dim;
  widen_part<first_part(type)>(codes, scale, part, target);
  if constexpr (type == RowType::q4) {
    widen_part<Codes::upper>(codes, scale, dim - part, target + part);
  }
}

#undef KVZAP_INLINE_HERE
#include "linalg/host/quantised_row_products_avx512.inc"

bool has_vnni() { return base::byte_products() == base::ByteProducts::avx512_vnni; }

template <int G>
KVZAP_TARGET_AVX2 void score_block(const SomeRows& keys, const QuantisedQueries& queries, int from,
                                   float* scores, int stride, const AheadBytes& ahead) {
  const int width = packed_width(keys.all.type, keys.all.dim);
  const QuantisedQueries some{queries.numbers + std::int64_t{from} * width, queries.sums + from,
                              queries.scales + from, G};
  scores += std::int64_t{from} * stride;
  with_row_type(keys.all.type, [&](auto type) {
    const auto kernel = has_vnni() ? score_avx512<G, type()> : score_avx2<G, type()>;
    kernel(keys, some, scores, stride, ahead);
  });
  for (int q = 0; q < G; ++q) {
    scale_products(keys.scales, some.scales[q], keys.count, scores + std::int64_t{q} * stride);
  }
}

// Rounds the weights of G queries to 15 bits of the largest one. Rows up to the next multiple of 16
// weigh 0. Returns false if a weight is not finite.
template <int G>
KVZAP_TARGET_AVX2 bool round_weights(const float* weights, int stride, int rows,
                                     RoundedWeights<G>& rounded) {
  const int whole_rows = (rows + 15) / 16 * 16;
  for (int q = 0; q < G; ++q) {
    const float* own = weights + q * stride;
    alignas(32) float padded[most_rows];
    if (rows < whole_rows) {
      std::fill(std::copy_n(own, rows, padded), padded + whole_rows, 0.0f);
      own = padded;
    }
    __m256 largest = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
    for (int r = 0; r < whole_rows; r += 8) {
      const __m256 weight = _mm256_loadu_ps(own + r);
      largest = _mm256_max_ps(largest, weight);
      odd = _mm256_fmadd_ps(weight, _mm256_setzero_ps(), odd);
    }
    if (_mm256_movemask_ps(_mm256_cmp_ps(odd, odd, _CMP_UNORD_Q)) != 0) return false;
    __m128 most_of = _mm_max_ps(_mm256_castps256_ps128(largest), _mm256_extractf128_ps(largest, 1));
    most_of = _mm_max_ps(most_of, _mm_movehl_ps(most_of, most_of));
    const float most_weight =
        std::max(_mm_cvtss_f32(most_of), _mm_cvtss_f32(_mm_shuffle_ps(most_of, most_of, 1)));
    constexpr float most = 32767;
    rounded.scales[q] = most_weight / most;
    // The quotient of a smaller weight is not finite.
    constexpr float least = most / std::numeric_limits<float>::max();
    const __m256 by = _mm256_set1_ps(most_weight > least ? most / most_weight : 0.0f);
    __m256i total = _mm256_setzero_si256();
    for (int r = 0; r < whole_rows; r += 16) {
      const __m256i first = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(own + r), by));
      const __m256i second = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(own + r + 8), by));
      // Lanes of 128 bits have halves of both.
      const __m256i all = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xd8);
      total = _mm256_add_epi32(total, _mm256_madd_epi16(all, _mm256_set1_epi16(1)));
      _mm256_store_si256(reinterpret_cast<__m256i*>(rounded.numbers[q] + r), all);
    }
    alignas(32) std::int32_t totals[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(totals), total);
    std::int32_t sum = 0;
    for (const std::int32_t t : totals) sum += t;
    rounded.offsets[q] = level_offset * sum;
  }
  return true;
}

template <int G>
void accumulate_block(const QuantisedRows& values, std::int64_t first, int rows,
                      const float* weights, int stride, float* sums, const AheadBytes& ahead) {
  RoundedWeights<G> rounded;  // NOLINT(cppcoreguidelines-pro-type-member-init): filled next
  if (!round_weights<G>(weights, stride, rows, rounded)) {
    return accumulate_plainly(values, first, rows, weights, stride, G, sums);
  }
  const int width = packed_width(values.type, values.dim);
  const std::int64_t bytes = QuantisedRows::code_bytes(values.type, values.dim);
  const RowSpan<const std::uint8_t> codes{values.codes + first * bytes, bytes, rows};
  with_row_type(values.type, [&](auto type) {
    if (has_vnni()) return accumulate_avx512<G, type()>(codes, rounded, sums, width, ahead);
    constexpr Codes first = first_part(type());
    if constexpr (type() != RowType::q4) {
      return accumulate_avx2<G, first>(codes, rounded, sums, width, width, ahead);
    } else {
      const int part = width / 2;
      const std::int64_t half = ahead.bytes / 2;
      accumulate_avx2<G, first>(codes, rounded, sums, width, part, {ahead.begin, half});
      accumulate_avx2<G, Codes::upper>(codes, rounded, sums + part, width, part,
                                       {ahead.begin + half, ahead.bytes - half});
    }
  });
}

/// Calls work(G, first query) for blocks of 4 queries and a block of the others.
template <class Work>
void for_blocks(int queries, const Work& work) {
  int q = 0;
  for (; q + 4 <= queries; q += 4) work(std::integral_constant<int, 4>(), q);
  if (queries - q == 3) work(std::integral_constant<int, 3>(), q);
  if (queries - q == 2) work(std::integral_constant<int, 2>(), q);
  if (queries - q == 1) work(std::integral_constant<int, 1>(), q);
}

#endif

}  // namespace

void widen_quantised_row(const QuantisedRows& rows, std::int64_t row, float* target) {
#if KVZAP_X86
  if (base::machine().has(base::SimdLevel::avx2)) {
    return with_row_type(rows.type, [&](auto type) { widen_avx2<type()>(rows, row, target); });
  }
#endif
  const float scale = rows.scales[row];
  for (int d = 0; d < rows.dim; ++d) {
    target[d] = scale * static_cast<float>(rows.level_at(row, d));
  }
}

void pack_query(RowType type, const float* query, int dim, const QuantisedQueries& target,
                int index) {
  const int width = packed_width(type, dim);
  std::int16_t* const numbers = target.numbers + std::int64_t{index} * width;
  std::fill_n(numbers, width, std::int16_t{0});
  float largest = 0;
  bool finite = true;
  for (int d = 0; d < dim; ++d) {
    largest = std::max(largest, std::fabs(query[d]));
    finite = finite && std::isfinite(query[d]);
  }
  // Sums of products with levels of 255 and less, as kernels have them, fit 32 bits.
  const auto most =
      static_cast<float>(std::min(32767, std::numeric_limits<std::int32_t>::max() / 255 / dim));
  target.sums[index] = 0;
  target.scales[index] = finite ? largest / most : std::numeric_limits<float>::quiet_NaN();
  if (!finite || largest < std::numeric_limits<float>::min()) return;
  std::int32_t sum = 0;
  for (int d = 0; d < dim; ++d) {
    const auto number = static_cast<std::int16_t>(std::lrintf(query[d] / largest * most));
    numbers[query_place(type, dim, d)] = number;
    sum += number;
  }
  target.sums[index] = level_offset * sum;
}

void score_quantised_rows(const QuantisedRows& keys, std::int64_t first, int rows,
                          const QuantisedQueries& queries, float* scores, int stride,
                          [[maybe_unused]] const AheadBytes& ahead) {
#if KVZAP_X86
  if (base::machine().has(base::SimdLevel::avx2)) {
    float scales[most_rows];
    for (int r = 0; r < rows; ++r) scales[r] = keys.scales[first + r];
    std::fill(scales + rows, scales + (rows + 7) / 8 * 8, 0.0f);
    return for_blocks(queries.count, [&](auto block, int from) {
      score_block<decltype(block)::value>({keys, first, rows, scales}, queries, from, scores,
                                          stride, from == 0 ? ahead : AheadBytes());
    });
  }
#endif
  score_plainly(keys, first, rows, queries, scores, stride);
}

void accumulate_quantised_rows(const QuantisedRows& values, std::int64_t first, int rows,
                               RowSpan<const float> weights, float* sums,
                               [[maybe_unused]] const AheadBytes& ahead) {
  const auto queries = static_cast<int>(weights.count), stride = static_cast<int>(weights.stride);
#if KVZAP_X86
  if (base::machine().has(base::SimdLevel::avx2)) {
    const int width = packed_width(values.type, values.dim);
    return for_blocks(queries, [&](auto block, int from) {
      accumulate_block<decltype(block)::value>(
          values, first, rows, weights.data + std::int64_t{from} * stride, stride,
          sums + std::int64_t{from} * width, from == 0 ? ahead : AheadBytes());
    });
  }
#endif
  accumulate_plainly(values, first, rows, weights.data, stride, queries, sums);
}

}  // namespace kvzap::linalg

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
