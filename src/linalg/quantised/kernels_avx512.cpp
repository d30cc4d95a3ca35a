// Products of bytes by AVX512-VNNI: 64 codes a instruction, four inputs of 16 outputs.
#include "base/byte_products.hpp"
#include "linalg/quantised/kernels.hpp"

#if KVZAP_X86_BYTE_PRODUCTS
#include <immintrin.h>

#include <cstring>

// Within a group, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

#define KVZAP_TARGET_VNNI512 \
  __attribute__((target(KVZAP_AVX512 ",avx512vnni" KVZAP_WHOLE_REGISTERS)))
#define KVZAP_TARGET_BF16_512 \
  __attribute__((target(KVZAP_AVX512 ",avx512bf16" KVZAP_WHOLE_REGISTERS)))
#define KVZAP_INLINE_VNNI512 KVZAP_TARGET_VNNI512 inline __attribute__((always_inline))
#define KVZAP_INLINE_512 KVZAP_TARGET_AVX512 inline __attribute__((always_inline))

namespace kvzap::linalg::quantised::vnni512 {
namespace {

KVZAP_INLINE_512 __m512i load(const std::uint8_t* source) { return _mm512_loadu_si512(source); }

/// Loads the codes of a group as unsigned bytes; signed ones plus 128.
template <CodeKind Kind>
KVZAP_INLINE_512 void load_codes(const std::uint8_t* group, __m512i table,
                                 __m512i (&codes)[group_quads]) {
  if constexpr (Kind == CodeKind::bytes) {
    for (int quad = 0; quad < group_quads; ++quad) {
      codes[quad] = _mm512_xor_si512(load(group + quad * quad_bytes), _mm512_set1_epi8(-128));
    }
    return;
  }
  const __m512i mask = _mm512_set1_epi8(15);
  constexpr int planes = Kind == CodeKind::five_bits ? 1 : (Kind == CodeKind::six_bits ? 2 : 0);
  for (int quad = 0; quad < 4; ++quad) {
    const __m512i both = load(group + (planes + quad) * quad_bytes);
    codes[quad] = _mm512_and_si512(both, mask);
    codes[quad + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
  }
  if constexpr (Kind == CodeKind::five_bits) {
    const __m512i high = load(group);
    const __m512i bit = _mm512_set1_epi8(16);
    for (int quad = 0; quad < group_quads; ++quad) {
      const __m512i moved =
          quad < 4 ? _mm512_slli_epi16(high, 4 - quad) : _mm512_srli_epi16(high, quad - 4);
      codes[quad] = _mm512_ternarylogic_epi32(codes[quad], moved, bit, 0xf8);  // a | (b & c)
    }
  }
  if constexpr (Kind == CodeKind::six_bits) {
    const __m512i bits = _mm512_set1_epi8(48);
    for (int quad = 0; quad < group_quads; ++quad) {
      const __m512i high = load(group + quad / 4 * quad_bytes);
      const int left = 4 - quad % 4 * 2;
      const __m512i moved =
          left >= 0 ? _mm512_slli_epi16(high, left) : _mm512_srli_epi16(high, -left);
      codes[quad] = _mm512_ternarylogic_epi32(codes[quad], moved, bits, 0xf8);
    }
  }
  if constexpr (Kind == CodeKind::table) {
    for (__m512i& code : codes) code = _mm512_shuffle_epi8(table, code);
  }
}

/// Of kinds with a table: its entries plus 128, in each part of the register.
template <CodeKind Kind>
KVZAP_INLINE_512 __m512i load_table(const std::int8_t* table) {
  if (Kind != CodeKind::table) return _mm512_setzero_si512();
  return _mm512_xor_si512(
      _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))),
      _mm512_set1_epi8(-128));
}

template <CodeKind Kind>
KVZAP_INLINE_512 void prefetch_codes(const std::uint8_t* group) {
  for (std::int64_t line = 0; line < code_bytes(Kind); line += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(group + prefetch_bytes + line), _MM_HINT_T1);
  }
}

KVZAP_INLINE_VNNI512 __m512i broadcast(const std::int8_t* quad) {
  std::int32_t four = 0;
  std::memcpy(&four, quad, sizeof(four));
  return _mm512_set1_epi32(four);
}

/// Sums over the quads First … Last - 1, from `start`; in two chains if there is but one row.
template <int First, int Last, bool Split>
KVZAP_INLINE_VNNI512 __m512 dot(const __m512i (&codes)[group_quads], const std::int8_t* bytes,
                                __m512i start) {
  __m512i even = start;
  __m512i odd = _mm512_setzero_si512();
  for (int quad = First; quad < Last; ++quad) {
    __m512i& sum = Split && quad % 2 == 1 ? odd : even;
    sum = _mm512_dpbusd_epi32(sum, codes[quad], broadcast(bytes + 4 * quad));
  }
  return _mm512_cvtepi32_ps(Split ? _mm512_add_epi32(even, odd) : even);
}

template <CodeKind Kind, int Rows>
KVZAP_TARGET_VNNI512 void add_rows(const Chunk& chunk, const ByteRows& x, float* sums) {
  constexpr bool split = Rows < 3;
  const __m512i table = load_table<Kind>(chunk.table);
  const std::int64_t groups = x.groups();
  __m512 acc[Rows];
  for (int m = 0; m < Rows; ++m) acc[m] = _mm512_load_ps(sums + m * panel_outputs);
  for (std::int64_t g = 0; g < chunk.count; ++g) {
    __m512i codes[group_quads];
    if (Rows <= most_prefetching_rows) prefetch_codes<Kind>(chunk.codes + g * code_bytes(Kind));
    load_codes<Kind>(chunk.codes + g * code_bytes(Kind), table, codes);
    const float* const own = chunk.coefficients + g * coefficients_of_group(Kind);
    const std::int64_t group = chunk.first + g;
    const __m512 scale = _mm512_load_ps(own);
    for (int m = 0; m < Rows; ++m) {
      const std::int8_t* const bytes = x.values + m * x.inputs + group * group_inputs;
      const __m512 scale_of_x = _mm512_set1_ps(x.scales[m * groups + group]);
      if constexpr (is_signed(Kind)) {
        const __m512i start = _mm512_set1_epi32(x.starts[m * groups + group]);
        acc[m] = _mm512_fmadd_ps(dot<0, 8, split>(codes, bytes, start),
                                 _mm512_mul_ps(scale, scale_of_x), acc[m]);
      } else {
        const __m512i zero = _mm512_setzero_si512();
        const __m512 shift = _mm512_load_ps(own + panel_outputs);
        if constexpr (Kind == CodeKind::six_bits) {
          acc[m] = _mm512_fmadd_ps(dot<0, 4, split>(codes, bytes, zero),
                                   _mm512_mul_ps(scale, scale_of_x), acc[m]);
          const float* const total = x.sums + 2 * (m * groups + group);
          acc[m] = _mm512_fmadd_ps(shift, _mm512_set1_ps(total[0]), acc[m]);
          acc[m] = _mm512_fmadd_ps(
              dot<4, 8, split>(codes, bytes, zero),
              _mm512_mul_ps(_mm512_load_ps(own + 2 * panel_outputs), scale_of_x), acc[m]);
          acc[m] = _mm512_fmadd_ps(_mm512_load_ps(own + 3 * panel_outputs),
                                   _mm512_set1_ps(total[1]), acc[m]);
        } else {
          acc[m] = _mm512_fmadd_ps(dot<0, 8, split>(codes, bytes, zero),
                                   _mm512_mul_ps(scale, scale_of_x), acc[m]);
          acc[m] = _mm512_fmadd_ps(shift, _mm512_set1_ps(x.totals[m * groups + group]), acc[m]);
        }
      }
    }
  }
  for (int m = 0; m < Rows; ++m) _mm512_store_ps(sums + m * panel_outputs, acc[m]);
}

/// The values of one input of 16 outputs: byte `Byte` of the quad's words.
template <int Byte>
KVZAP_INLINE_512 __m512 value_of(__m512i quad, __m512 scale, __m512 shift) {
  __m512i code = Byte == 0 ? quad : _mm512_srli_epi32(quad, 8 * Byte);
  if (Byte != 3) code = _mm512_and_si512(code, _mm512_set1_epi32(255));
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(code), scale, shift);
}

/// The four inputs' values of a quad of a group.
template <CodeKind Kind>
KVZAP_INLINE_512 void quad_values(__m512i codes, int quad, const float* coefficients,
                                  __m512 (&values)[4]) {
  const float* const own =
      coefficients + (Kind == CodeKind::six_bits ? quad / 4 * 2 * panel_outputs : 0);
  const __m512 scale = _mm512_load_ps(own);
  // Exact: a scale has 11 bits, a signed code 8.
  const __m512 shift = is_signed(Kind) ? _mm512_mul_ps(scale, _mm512_set1_ps(-128.0f))
                                       : _mm512_load_ps(own + panel_outputs);
  values[0] = value_of<0>(codes, scale, shift);
  values[1] = value_of<1>(codes, scale, shift);
  values[2] = value_of<2>(codes, scale, shift);
  values[3] = value_of<3>(codes, scale, shift);
}

template <CodeKind Kind>
KVZAP_TARGET_AVX512 void unpack_floats(const Chunk& chunk, float* target) {
  const __m512i table = load_table<Kind>(chunk.table);
  for (std::int64_t g = 0; g < chunk.count; ++g) {
    __m512i codes[group_quads];
    load_codes<Kind>(chunk.codes + g * code_bytes(Kind), table, codes);
    float* const group = target + g * group_inputs * packed_outputs;
    for (int quad = 0; quad < group_quads; ++quad) {
      __m512 values[4];
      quad_values<Kind>(codes[quad], quad, chunk.coefficients + g * coefficients_of_group(Kind),
                        values);
      for (int i = 0; i < 4; ++i) {
        _mm512_storeu_ps(group + (4 * quad + i) * packed_outputs, values[i]);
      }
    }
  }
}

alignas(64) constexpr std::int16_t alternate_words[32] = {
    0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
    8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

template <CodeKind Kind>
KVZAP_TARGET_BF16_512 void unpack_pairs(const Chunk& chunk, bfloat16* target) {
  const __m512i alternately = _mm512_load_si512(alternate_words);
  const __m512i table = load_table<Kind>(chunk.table);
  for (std::int64_t g = 0; g < chunk.count; ++g) {
    __m512i codes[group_quads];
    load_codes<Kind>(chunk.codes + g * code_bytes(Kind), table, codes);
    bfloat16* const group = target + g * group_inputs * packed_outputs;
    for (int quad = 0; quad < group_quads; ++quad) {
      __m512 values[4];
      quad_values<Kind>(codes[quad], quad, chunk.coefficients + g * coefficients_of_group(Kind),
                        values);
      for (int i = 0; i < 4; i += 2) {
        const auto both = (__m512i)_mm512_cvtne2ps_pbh(values[i + 1], values[i]);
        _mm512_storeu_si512(group + (4 * quad + i) * packed_outputs,
                            _mm512_permutexvar_epi16(alternately, both));
      }
    }
  }
}

template <CodeKind Kind>
void add_groups(const Chunk& chunk, const ByteRows& x, int n_rows, float* sums) {
  int m = 0;
  const auto take = [&](int rows, auto add) {
    for (; n_rows - m >= rows; m += rows) add(chunk, x.row(m), sums + m * panel_outputs);
  };
  take(8, add_rows<Kind, 8>);
  take(4, add_rows<Kind, 4>);
  take(2, add_rows<Kind, 2>);
  take(1, add_rows<Kind, 1>);
}

}  // namespace
}  // namespace kvzap::linalg::quantised::vnni512

namespace kvzap::linalg::quantised {

KVZAP_TARGET_AVX512 void widen_group_minimum_avx512(const std::uint8_t* block, float* target) {
  const auto* vectors = reinterpret_cast<const __m256i*>(block);
  const __m512 factor = _mm512_cvtph_ps(_mm256_loadu_si256(vectors));
  const __m512 minimum =
      _mm512_sub_ps(_mm512_setzero_ps(), _mm512_cvtph_ps(_mm256_loadu_si256(vectors + 1)));
  const auto* bytes = reinterpret_cast<const __m128i*>(block + 4 * panel_outputs);
  for (int group = 0; group < 8; ++group, target += 2 * panel_outputs) {
    const __m512i scales = _mm512_cvtepu8_epi32(_mm_loadu_si128(bytes + group));
    const __m512i minima = _mm512_cvtepu8_epi32(_mm_loadu_si128(bytes + 8 + group));
    _mm512_storeu_ps(target, _mm512_mul_ps(factor, _mm512_cvtepi32_ps(scales)));
    _mm512_storeu_ps(target + panel_outputs, _mm512_mul_ps(minimum, _mm512_cvtepi32_ps(minima)));
  }
}

KVZAP_TARGET_AVX512 void widen_group_of_16_avx512(const std::uint8_t* block, float offset,
                                                  float* target) {
  const __m512 factor =
      _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block)));
  const __m512 negative = _mm512_set1_ps(-offset);
  const auto* bytes = reinterpret_cast<const __m128i*>(block + 2 * panel_outputs);
  for (int group = 0; group < 16; ++group, target += 2 * panel_outputs) {
    const __m512i scales = _mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + group));
    const __m512 scale = _mm512_mul_ps(factor, _mm512_cvtepi32_ps(scales));
    _mm512_storeu_ps(target, scale);
    _mm512_storeu_ps(target + panel_outputs, _mm512_mul_ps(negative, scale));
  }
}

void add_chunk_avx512_vnni(CodeKind kind, const Chunk& chunk, const ByteRows& x, int n_rows,
                           float* sums) {
  KVZAP_FOR_CODE_KIND(kind, vnni512::add_groups, chunk, x, n_rows, sums)
}

void unpack_chunk_avx512(CodeKind kind, const Chunk& chunk, float* target) {
  KVZAP_FOR_CODE_KIND(kind, vnni512::unpack_floats, chunk, target)
}

void unpack_chunk_avx512_bf16(CodeKind kind, const Chunk& chunk, bfloat16* target) {
  KVZAP_FOR_CODE_KIND(kind, vnni512::unpack_pairs, chunk, target)
}

}  // namespace kvzap::linalg::quantised

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
#endif
