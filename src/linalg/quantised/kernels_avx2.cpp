// Products of bytes by AVX2, and by AVX-VNNI: 32 codes an instruction, four inputs of 8 outputs.
#include "base/byte_products.hpp"
#include "linalg/quantised/kernels.hpp"

#if KVZAP_X86_BYTE_PRODUCTS
#include <immintrin.h>

#include <algorithm>
#include <cstring>

// Within a group, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

#define KVZAP_TARGET_VNNI256 __attribute__((target(KVZAP_AVX2 ",avxvnni")))
#define KVZAP_INLINE_AVX2 KVZAP_TARGET_AVX2 inline __attribute__((always_inline))
// Loops over registers; and loops that GCC would unroll to keep all their products on the stack.
#define KVZAP_UNROLL _Pragma("GCC unroll 16")
#define KVZAP_ROLL _Pragma("GCC unroll 1")

namespace kvzap::linalg::quantised::bytes256 {
namespace {

constexpr int half_bytes = 32;  // of a quad: 8 outputs
constexpr int lanes = 8;
// With more rows, the sums of both sides do not fit the registers.
constexpr int most_rows_of_both_sides = 2;

KVZAP_INLINE_AVX2 __m256i load(const std::uint8_t* source) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
}

template <CodeKind Kind>
KVZAP_INLINE_AVX2 void prefetch_codes(const std::uint8_t* group) {
  for (std::int64_t line = 0; line < code_bytes(Kind); line += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(group + near_prefetch_bytes + line), _MM_HINT_T0);
  }
}

/// Of kinds with a table: it, in each half of the register.
template <CodeKind Kind>
KVZAP_INLINE_AVX2 __m256i load_table(const std::int8_t* table) {
  if (Kind != CodeKind::table) return _mm256_setzero_si256();
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
}

/// Loads the codes of a quad of 8 outputs; signed kinds as they are.
template <CodeKind Kind>
KVZAP_INLINE_AVX2 __m256i load_quad(const std::uint8_t* group, int quad, __m256i table) {
  if constexpr (Kind == CodeKind::bytes) return load(group + quad * quad_bytes);
  constexpr int planes = Kind == CodeKind::five_bits ? 1 : (Kind == CodeKind::six_bits ? 2 : 0);
  const __m256i both = load(group + (planes + quad % 4) * quad_bytes);
  const __m256i nibbles =
      _mm256_and_si256(quad < 4 ? both : _mm256_srli_epi16(both, 4), _mm256_set1_epi8(15));
  if constexpr (Kind == CodeKind::table) return _mm256_shuffle_epi8(table, nibbles);
  if constexpr (planes == 0) return nibbles;
  const __m256i high = load(Kind == CodeKind::five_bits ? group : group + quad / 4 * quad_bytes);
  const int left = Kind == CodeKind::five_bits ? 4 - quad : 4 - quad % 4 * 2;
  const __m256i moved = left >= 0 ? _mm256_slli_epi16(high, left) : _mm256_srli_epi16(high, -left);
  const __m256i mask = _mm256_set1_epi8(Kind == CodeKind::five_bits ? 16 : 48);
  return _mm256_or_si256(nibbles, _mm256_and_si256(moved, mask));
}

KVZAP_INLINE_AVX2 __m256i broadcast(const std::int8_t* quad) {
  std::int32_t four = 0;
  std::memcpy(&four, quad, sizeof(four));
  return _mm256_set1_epi32(four);
}

/// Quads whose sums of pairs fit 16 bits: 8 * 2 * 15 * 127, 4 * 2 * 31 * 127, 2 * 2 * 63 * 127,
/// 2 * 128 * 127.
template <CodeKind Kind>
constexpr int quads_of_16_bits = Kind == CodeKind::nibbles
                                     ? 8
                                     : (Kind == CodeKind::five_bits
                                            ? 4
                                            : (Kind == CodeKind::six_bits ? 2 : 1));

/// Adds the quads First … Last - 1 for 8 outputs to dots.
template <CodeKind Kind, int Rows, int First, int Last>
KVZAP_INLINE_AVX2 void dot(const std::uint8_t* group, const std::int8_t* x, std::int64_t x_stride,
                           __m256i table, __m256i (&dots)[Rows]) {
  constexpr int together = quads_of_16_bits<Kind>;
  const __m256i ones = _mm256_set1_epi16(1);
  for (int m = 0; m < Rows; ++m) dots[m] = _mm256_setzero_si256();
  for (int begin = First; begin < Last; begin += together) {
    __m256i pairs[Rows];
    for (int quad = begin; quad < begin + together && quad < Last; ++quad) {
      const __m256i codes = load_quad<Kind>(group, quad, table);
      const __m256i magnitude = is_signed(Kind) ? _mm256_abs_epi8(codes) : codes;
      for (int m = 0; m < Rows; ++m) {
        __m256i bytes = broadcast(x + m * x_stride + 4 * quad);
        // |code| * (x with the code's sign): at most 128 * 127, so that a pair fits.
        if (is_signed(Kind)) bytes = _mm256_sign_epi8(bytes, codes);
        const __m256i pair = _mm256_maddubs_epi16(magnitude, bytes);
        pairs[m] = quad == begin ? pair : _mm256_add_epi16(pairs[m], pair);
      }
    }
    for (int m = 0; m < Rows; ++m) {
      dots[m] = _mm256_add_epi32(dots[m], _mm256_madd_epi16(pairs[m], ones));
    }
  }
}

/// The same by AVX-VNNI. Signed codes are used plus 128, so their dots begin with `starts`.
template <CodeKind Kind, int Rows, int First, int Last>
KVZAP_TARGET_VNNI256 inline __attribute__((always_inline)) void dot_vnni(
    const std::uint8_t* group, const std::int8_t* x, std::int64_t x_stride, __m256i table,
    const std::int32_t* starts, std::int64_t groups, __m256i (&dots)[Rows]) {
  for (int m = 0; m < Rows; ++m) {
    dots[m] = is_signed(Kind) ? _mm256_set1_epi32(starts[m * groups]) : _mm256_setzero_si256();
  }
  for (int quad = First; quad < Last; ++quad) {
    __m256i codes = load_quad<Kind>(group, quad, table);
    if (is_signed(Kind)) codes = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
    for (int m = 0; m < Rows; ++m) {
      dots[m] = _mm256_dpbusd_avx_epi32(dots[m], codes, broadcast(x + m * x_stride + 4 * quad));
    }
  }
}

template <int Rows>
KVZAP_INLINE_AVX2 void add_scaled(const __m256i (&dots)[Rows], const float* scale,
                                  const ByteRows& x, std::int64_t group, __m256 (&acc)[Rows]) {
  for (int m = 0; m < Rows; ++m) {
    const __m256 factor =
        _mm256_mul_ps(_mm256_load_ps(scale), _mm256_set1_ps(x.scales[m * x.groups() + group]));
    acc[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[m]), factor, acc[m]);
  }
}

template <CodeKind Kind, int Rows>
KVZAP_INLINE_AVX2 void add_shifts(const float* own, const ByteRows& x, std::int64_t group,
                                  __m256 (&acc)[Rows]) {
  const __m256 shift = _mm256_load_ps(own + panel_outputs);
  for (int m = 0; m < Rows; ++m) {
    const std::int64_t at = m * x.groups() + group;
    if constexpr (Kind == CodeKind::six_bits) {
      const float* const total = x.sums + 2 * at;
      acc[m] = _mm256_fmadd_ps(shift, _mm256_set1_ps(total[0]), acc[m]);
      acc[m] = _mm256_fmadd_ps(_mm256_load_ps(own + 3 * panel_outputs), _mm256_set1_ps(total[1]),
                               acc[m]);
    } else {
      acc[m] = _mm256_fmadd_ps(shift, _mm256_set1_ps(x.totals[at]), acc[m]);
    }
  }
}

/// One loop for both instruction sets; dot_of is called as dot_of<First, Last>. One row or two
/// take both sides of a group together. With one side after the other, the second side reads only
/// caches while memory waits: on two cores of an AMD EPYC (Zen 3) one row then reads Q8_0 at 15.0
/// GB/s and not at 17.3, Q4_0 at 12.3 and not at 15.0, Q4_K at 13.2 and not at 16.0.
#define KVZAP_ADD_ROWS(Target, name, dot_of)                                             \
  template <CodeKind Kind, int Rows>                                                     \
  Target void name(const Chunk& chunk, const ByteRows& x, float* sums) {                 \
    const __m256i table = load_table<Kind>(chunk.table);                                 \
    constexpr int sides = Rows <= most_rows_of_both_sides ? 2 : 1;                       \
    for (int first_side = 0; first_side < 2; first_side += sides) {                      \
      float* const own_sums = sums + first_side * lanes;                                 \
      __m256 acc[sides][Rows];                                                           \
      for (int s = 0; s < sides; ++s) {                                                  \
        for (int m = 0; m < Rows; ++m) {                                                 \
          acc[s][m] = _mm256_load_ps(own_sums + s * lanes + m * panel_outputs);          \
        }                                                                                \
      }                                                                                  \
      for (std::int64_t g = 0; g < chunk.count; ++g) {                                   \
        const std::uint8_t* const group_codes = chunk.codes + g * code_bytes(Kind);      \
        const std::int64_t group = chunk.first + g;                                      \
        if (first_side == 0) prefetch_codes<Kind>(group_codes);                          \
        for (int s = 0; s < sides; ++s) {                                                \
          const int side = first_side + s;                                               \
          const std::uint8_t* const codes = group_codes + side * half_bytes;             \
          const float* const own =                                                       \
              chunk.coefficients + g * coefficients_of_group(Kind) + side * lanes;       \
          __m256i dots[Rows];                                                            \
          if constexpr (Kind == CodeKind::six_bits) {                                    \
            dot_of(0, 4);                                                                \
            add_scaled<Rows>(dots, own, x, group, acc[s]);                               \
            dot_of(4, 8);                                                                \
            add_scaled<Rows>(dots, own + 2 * panel_outputs, x, group, acc[s]);           \
          } else {                                                                       \
            dot_of(0, 8);                                                                \
            add_scaled<Rows>(dots, own, x, group, acc[s]);                               \
          }                                                                              \
          if constexpr (!is_signed(Kind)) add_shifts<Kind, Rows>(own, x, group, acc[s]); \
        }                                                                                \
      }                                                                                  \
      for (int s = 0; s < sides; ++s) {                                                  \
        for (int m = 0; m < Rows; ++m) {                                                 \
          _mm256_store_ps(own_sums + s * lanes + m * panel_outputs, acc[s][m]);          \
        }                                                                                \
      }                                                                                  \
    }                                                                                    \
  }
#define KVZAP_DOT_AVX2(first, last) \
  dot<Kind, Rows, first, last>(codes, x.values + group * group_inputs, x.inputs, table, dots)
#define KVZAP_DOT_VNNI(first, last)                                                          \
  dot_vnni<Kind, Rows, first, last>(codes, x.values + group * group_inputs, x.inputs, table, \
                                    x.starts + group, x.groups(), dots)
KVZAP_ADD_ROWS(KVZAP_TARGET_AVX2, add_rows, KVZAP_DOT_AVX2)
KVZAP_ADD_ROWS(KVZAP_TARGET_VNNI256, add_rows_vnni, KVZAP_DOT_VNNI)

// Tiles of rows and both sides take codes, unpacked once for all rows, from the first-level cache.
// Where 16 bits hold the sums of many quads, those of six rows stay in registers beside two vectors
// of codes. Else sums are widened at once, and those of four rows stay. On a core of an AMD EPYC
// (Zen 3) 96 rows multiply 90 values a nanosecond with nibbles and not 63, 55 with codes of five
// bits and not 44 (on a slower day), 63 with six bits and not 57, 60 with bytes and not 57, 61 with
// tables and not 54; where another thread shares the core, 45 with bytes and not 40.
constexpr std::int64_t tile_groups = 16;  // 8 KiB of codes
template <CodeKind Kind>
constexpr bool widens_at_once = quads_of_16_bits<Kind> <= 2;
template <CodeKind Kind>
constexpr int tile_rows = widens_at_once<Kind> ? 4 : 6;

/// Sums of 8 outputs each: (row, side).
template <int Rows>
using TileSums = __m256i[2 * Rows];

/// Products of the quads First … Last - 1 of a group of unpacked codes with the rows of a tile,
/// widened at once.
template <CodeKind Kind, int Rows, int First, int Last>
KVZAP_INLINE_AVX2 void dot_tile_at_once(const std::uint8_t* codes, const std::int8_t* x,
                                        std::int64_t x_stride, TileSums<Rows>& dots) {
  constexpr int together = quads_of_16_bits<Kind>;
  __m256i ones = _mm256_set1_epi16(1);
  asm("" : "+x"(ones));  // or GCC reads it from memory each time
  KVZAP_UNROLL for (int i = 0; i < 2 * Rows; ++i) dots[i] = _mm256_setzero_si256();
  KVZAP_UNROLL for (int begin = First; begin < Last; begin += together) {
    __m256i code[2 * together], magnitude[2 * together];
    KVZAP_UNROLL for (int i = 0; i < 2 * together; ++i) {
      code[i] = load(codes + begin * quad_bytes + i * half_bytes);
      magnitude[i] = is_signed(Kind) ? _mm256_abs_epi8(code[i]) : code[i];
    }
    KVZAP_UNROLL for (int r = 0; r < Rows; ++r) {
      __m256i pairs[2];
      KVZAP_UNROLL for (int i = 0; i < 2 * together; ++i) {
        __m256i bytes = broadcast(x + r * x_stride + 4 * (begin + i / 2));
        if (is_signed(Kind)) bytes = _mm256_sign_epi8(bytes, code[i]);
        const __m256i pair = _mm256_maddubs_epi16(magnitude[i], bytes);
        pairs[i % 2] = i < 2 ? pair : _mm256_add_epi16(pairs[i % 2], pair);
      }
      KVZAP_UNROLL for (int side = 0; side < 2; ++side) {
        const __m256i sum = _mm256_madd_epi16(pairs[side], ones);
        // GCC would add into another register, and run out of them.
        asm("vpaddd %1, %0, %0" : "+x"(dots[2 * r + side]) : "x"(sum));
      }
    }
  }
}

/// Products of a group of unpacked codes with the rows of a tile.
template <CodeKind Kind, int Rows>
KVZAP_INLINE_AVX2 void dot_tile(const std::uint8_t* codes, const std::int8_t* x,
                                std::int64_t x_stride, TileSums<Rows>& dots) {
  constexpr int together = quads_of_16_bits<Kind>;
  const __m256i ones = _mm256_set1_epi16(1);
  KVZAP_ROLL for (int begin = 0; begin < group_quads; begin += together) {
    TileSums<Rows> pairs;
    KVZAP_UNROLL for (int i = 0; i < 2 * Rows; ++i) pairs[i] = _mm256_setzero_si256();
    KVZAP_ROLL for (int quad = begin; quad < begin + together; ++quad) {
      const __m256i code[2] = {load(codes + quad * quad_bytes),
                               load(codes + quad * quad_bytes + half_bytes)};
      KVZAP_UNROLL for (int i = 0; i < 2 * Rows; ++i) {
        const __m256i pair =
            _mm256_maddubs_epi16(code[i % 2], broadcast(x + i / 2 * x_stride + 4 * quad));
        asm("vpaddw %1, %0, %0" : "+x"(pairs[i]) : "x"(pair));  // see dot_tile_at_once
      }
    }
    KVZAP_UNROLL for (int i = 0; i < 2 * Rows; ++i) {
      const __m256i sum = _mm256_madd_epi16(pairs[i], ones);
      dots[i] = begin == 0 ? sum : _mm256_add_epi32(dots[i], sum);
    }
  }
}

/// Scales the dots of a group with `own` and adds them to sums (Rows, 16).
template <int Rows>
KVZAP_INLINE_AVX2 void add_scaled_tile(const TileSums<Rows>& dots, const float* own,
                                       const ByteRows& x, std::int64_t group, float* sums) {
  KVZAP_UNROLL for (int i = 0; i < 2 * Rows; ++i) {
    float* const sum = sums + i / 2 * panel_outputs + i % 2 * lanes;
    const __m256 factor = _mm256_mul_ps(_mm256_load_ps(own + i % 2 * lanes),
                                        _mm256_set1_ps(x.scales[i / 2 * x.groups() + group]));
    _mm256_store_ps(sum, _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[i]), factor, _mm256_load_ps(sum)));
  }
}

/// Adds shift * total for the rows of a tile. total: of row 0; the next ones follow at `stride`.
template <int Rows>
KVZAP_INLINE_AVX2 void add_shifts_tile(const float* shifts, const float* total, std::int64_t stride,
                                       float* sums) {
  KVZAP_UNROLL for (int i = 0; i < 2 * Rows; ++i) {
    float* const sum = sums + i / 2 * panel_outputs + i % 2 * lanes;
    _mm256_store_ps(sum,
                    _mm256_fmadd_ps(_mm256_load_ps(shifts + i % 2 * lanes),
                                    _mm256_set1_ps(total[i / 2 * stride]), _mm256_load_ps(sum)));
  }
}

/// Adds the products of groups begin … end - 1 of a chunk, as add_rows does to the last bit.
/// `codes`: unpacked, from group `begin` on.
template <CodeKind Kind, int Rows>
KVZAP_TARGET_AVX2 void add_tile(const Chunk& chunk, const std::uint8_t* codes, std::int64_t begin,
                                std::int64_t end, const ByteRows& x, float* sums) {
  for (std::int64_t g = begin; g < end; ++g, codes += group_quads * quad_bytes) {
    const std::int64_t group = chunk.first + g;
    const float* const own = chunk.coefficients + g * coefficients_of_group(Kind);
    const std::int8_t* const values = x.values + group * group_inputs;
    TileSums<Rows> dots;
    if constexpr (Kind == CodeKind::six_bits) {
      dot_tile_at_once<Kind, Rows, 0, 4>(codes, values, x.inputs, dots);
      add_scaled_tile<Rows>(dots, own, x, group, sums);
      dot_tile_at_once<Kind, Rows, 4, 8>(codes, values, x.inputs, dots);
      add_scaled_tile<Rows>(dots, own + 2 * panel_outputs, x, group, sums);
      const float* const totals = x.sums + 2 * group;
      add_shifts_tile<Rows>(own + panel_outputs, totals, 2 * x.groups(), sums);
      add_shifts_tile<Rows>(own + 3 * panel_outputs, totals + 1, 2 * x.groups(), sums);
    } else {
      if constexpr (widens_at_once<Kind>) {
        dot_tile_at_once<Kind, Rows, 0, group_quads>(codes, values, x.inputs, dots);
      } else {
        dot_tile<Kind, Rows>(codes, values, x.inputs, dots);
      }
      add_scaled_tile<Rows>(dots, own, x, group, sums);
      if constexpr (!is_signed(Kind)) {
        add_shifts_tile<Rows>(own + panel_outputs, x.totals + group, x.groups(), sums);
      }
    }
    asm("" : : : "memory");  // or GCC keeps the sums twice, on its stack, too
  }
}

template <CodeKind Kind>
KVZAP_INLINE_AVX2 void unpack_codes(const std::uint8_t* codes, std::int64_t groups,
                                    const std::int8_t* values, std::uint8_t* target) {
  const __m256i table = load_table<Kind>(values);
  for (; groups > 0; --groups, codes += code_bytes(Kind)) {
    KVZAP_UNROLL for (int i = 0; i < 2 * group_quads; ++i, target += half_bytes) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(target),
                         load_quad<Kind>(codes + i % 2 * half_bytes, i / 2, table));
    }
  }
}

/// Takes tiles of all rows but the last few. Returns the rows taken.
template <CodeKind Kind>
KVZAP_TARGET_AVX2 int add_tiles(const Chunk& chunk, const ByteRows& x, int n_rows, float* sums) {
  constexpr int most = tile_rows<Kind>;
  alignas(64) std::uint8_t unpacked[tile_groups * group_quads * quad_bytes];
  int m = 0;
  for (std::int64_t begin = 0; begin < chunk.count; begin += tile_groups) {
    const std::int64_t end = std::min(begin + tile_groups, chunk.count);
    const std::uint8_t* codes = chunk.codes + begin * code_bytes(Kind);
    if constexpr (Kind != CodeKind::bytes) {
      unpack_codes<Kind>(codes, end - begin, chunk.table, unpacked);
      codes = unpacked;
    }
    for (m = 0; n_rows - m >= most; m += most) {
      add_tile<Kind, most>(chunk, codes, begin, end, x.row(m), sums + m * panel_outputs);
    }
    if (most > 4 && n_rows - m >= 4) {
      add_tile<Kind, 4>(chunk, codes, begin, end, x.row(m), sums + m * panel_outputs);
      m += 4;
    }
  }
  return m;
}

// Fewer rows do not pay for unpacked codes; those of six bits take the most instructions.
template <CodeKind Kind>
constexpr int least_rows_of_tiles = Kind == CodeKind::six_bits ? 24 : 8;

template <CodeKind Kind, bool Vnni>
void add_groups(const Chunk& chunk, const ByteRows& x, int n_rows, float* sums) {
  int m = 0;
  if constexpr (!Vnni) {
    if (n_rows >= least_rows_of_tiles<Kind>) m = add_tiles<Kind>(chunk, x, n_rows, sums);
  }
  const auto take = [&](int rows, auto add, auto add_vnni) {
    for (; n_rows - m >= rows; m += rows) {
      (Vnni ? add_vnni : add)(chunk, x.row(m), sums + m * panel_outputs);
    }
  };
  take(4, add_rows<Kind, 4>, add_rows_vnni<Kind, 4>);
  take(2, add_rows<Kind, 2>, add_rows_vnni<Kind, 2>);
  take(1, add_rows<Kind, 1>, add_rows_vnni<Kind, 1>);
}

template <CodeKind Kind>
void add_by_avx2(const Chunk& chunk, const ByteRows& x, int n_rows, float* sums) {
  add_groups<Kind, false>(chunk, x, n_rows, sums);
}
template <CodeKind Kind>
void add_by_vnni(const Chunk& chunk, const ByteRows& x, int n_rows, float* sums) {
  add_groups<Kind, true>(chunk, x, n_rows, sums);
}

template <CodeKind Kind>
KVZAP_TARGET_AVX2 void unpack_floats(const Chunk& chunk, float* target) {
  const __m256i table = load_table<Kind>(chunk.table);
  for (std::int64_t i = 0; i < chunk.count * 2 * group_quads; ++i) {
    const std::int64_t g = i / (2 * group_quads);
    const int side = static_cast<int>(i / group_quads % 2);
    const int quad = static_cast<int>(i % group_quads);
    const float* const own = chunk.coefficients + g * coefficients_of_group(Kind) + side * lanes +
                             (Kind == CodeKind::six_bits ? quad / 4 * 2 * panel_outputs : 0);
    const __m256 scale = _mm256_load_ps(own);
    const __m256 shift =
        is_signed(Kind) ? _mm256_setzero_ps() : _mm256_load_ps(own + panel_outputs);
    const __m256i codes =
        load_quad<Kind>(chunk.codes + g * code_bytes(Kind) + side * half_bytes, quad, table);
    float* const values = target + (g * group_inputs + 4 * quad) * packed_outputs + side * lanes;
    for (int byte = 0; byte < 4; ++byte) {
      const __m256i high = _mm256_slli_epi32(codes, 24 - 8 * byte);
      const __m256i code =
          is_signed(Kind) ? _mm256_srai_epi32(high, 24) : _mm256_srli_epi32(high, 24);
      _mm256_storeu_ps(values + byte * packed_outputs,
                       _mm256_fmadd_ps(_mm256_cvtepi32_ps(code), scale, shift));
    }
  }
}

}  // namespace
}  // namespace kvzap::linalg::quantised::bytes256

namespace kvzap::linalg::quantised {

KVZAP_TARGET_AVX2 void widen_group_minimum_avx2(const std::uint8_t* block, float* target) {
  for (int side = 0; side < 2; ++side) {
    const auto* halves = reinterpret_cast<const __m128i*>(block) + side;
    const __m256 factor = _mm256_cvtph_ps(_mm_loadu_si128(halves));
    const __m256 minimum =
        _mm256_sub_ps(_mm256_setzero_ps(), _mm256_cvtph_ps(_mm_loadu_si128(halves + 2)));
    const std::uint8_t* bytes = block + 4 * panel_outputs + side * bytes256::lanes;
    float* own = target + side * bytes256::lanes;
    for (int group = 0; group < 8; ++group, bytes += panel_outputs, own += 2 * panel_outputs) {
      const auto* scales = reinterpret_cast<const __m128i*>(bytes);
      const auto* minima = reinterpret_cast<const __m128i*>(bytes + 8 * panel_outputs);
      const __m256i scale = _mm256_cvtepu8_epi32(_mm_loadl_epi64(scales));
      const __m256i shift = _mm256_cvtepu8_epi32(_mm_loadl_epi64(minima));
      _mm256_storeu_ps(own, _mm256_mul_ps(factor, _mm256_cvtepi32_ps(scale)));
      _mm256_storeu_ps(own + panel_outputs, _mm256_mul_ps(minimum, _mm256_cvtepi32_ps(shift)));
    }
  }
}

KVZAP_TARGET_AVX2 void widen_group_of_16_avx2(const std::uint8_t* block, float offset,
                                              float* target) {
  const __m256 negative = _mm256_set1_ps(-offset);
  for (int side = 0; side < 2; ++side) {
    const auto* halves = reinterpret_cast<const __m128i*>(block) + side;
    const __m256 factor = _mm256_cvtph_ps(_mm_loadu_si128(halves));
    const std::uint8_t* bytes = block + 2 * panel_outputs + side * bytes256::lanes;
    float* own = target + side * bytes256::lanes;
    for (int group = 0; group < 16; ++group, bytes += panel_outputs, own += 2 * panel_outputs) {
      const __m256i scales =
          _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
      const __m256 scale = _mm256_mul_ps(factor, _mm256_cvtepi32_ps(scales));
      _mm256_storeu_ps(own, scale);
      _mm256_storeu_ps(own + panel_outputs, _mm256_mul_ps(negative, scale));
    }
  }
}

// Compilers turn the loops over a group into scalar code, which takes ten times as long.
KVZAP_TARGET_AVX2 void round_to_bytes_avx2(const float* x, const ByteRows& row) {
  const __m256i magnitude_bits = _mm256_set1_epi32(0x7fffffff);
  const __m256 rounding = _mm256_set1_ps(12582912.0f);  // 1.5 * 2^23: see the portable form
  const __m256i integer_of_rounding = _mm256_set1_epi32(0x4b400000);
  for (std::int64_t g = 0; g < row.groups(); ++g) {
    __m256i parts[4];
    __m256i most = _mm256_setzero_si256();
    KVZAP_UNROLL for (int i = 0; i < 4; ++i) {
      parts[i] = _mm256_castps_si256(_mm256_loadu_ps(x + g * group_inputs + i * bytes256::lanes));
      most = _mm256_max_epu32(most, _mm256_and_si256(parts[i], magnitude_bits));
    }
    __m128i half = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1));
    const auto largest = static_cast<std::uint32_t>(_mm_cvtsi128_si32(half));
    const float magnitude = base::bits_float(largest);
    const bool is_finite = largest < 0x7f800000u;
    const float scale = is_finite ? magnitude / 127.0f : base::bits_float(0x7fc00000u);
    const float inverse = is_finite && scale >= 1.17549435e-38f ? 127.0f / magnitude : 0.0f;
    const __m256 by = _mm256_set1_ps(inverse);
    const __m256i kept = _mm256_set1_epi32(is_finite ? -1 : 0);
    KVZAP_UNROLL for (int i = 0; i < 4; ++i) {
      const __m256 value = _mm256_castsi256_ps(_mm256_and_si256(parts[i], kept));
      parts[i] = _mm256_sub_epi32(_mm256_castps_si256(_mm256_fmadd_ps(value, by, rounding)),
                                  integer_of_rounding);
    }
    // Packing interleaves the halves of its operands: words 0 4 1 5 2 6 3 7 become 0 to 7.
    const __m256i bytes =
        _mm256_permutevar8x32_epi32(_mm256_packs_epi16(_mm256_packs_epi32(parts[0], parts[1]),
                                                       _mm256_packs_epi32(parts[2], parts[3])),
                                    _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row.values + g * group_inputs), bytes);
    const __m256i pairs = _mm256_hadd_epi32(_mm256_add_epi32(parts[0], parts[1]),
                                            _mm256_add_epi32(parts[2], parts[3]));
    const __m256i quads = _mm256_hadd_epi32(pairs, pairs);  // both sums of each half
    const __m128i sums =
        _mm_add_epi32(_mm256_castsi256_si128(quads), _mm256_extracti128_si256(quads, 1));
    const int first = _mm_cvtsi128_si32(sums), second = _mm_extract_epi32(sums, 1);
    row.scales[g] = scale;
    row.sums[2 * g] = scale * static_cast<float>(first);
    row.sums[2 * g + 1] = scale * static_cast<float>(second);
    row.totals[g] = row.sums[2 * g] + row.sums[2 * g + 1];
    row.starts[g] = -128 * (first + second);
  }
}

void add_chunk_avx2(CodeKind kind, const Chunk& chunk, const ByteRows& x, int n_rows, float* sums) {
  KVZAP_FOR_CODE_KIND(kind, bytes256::add_by_avx2, chunk, x, n_rows, sums)
}
void add_chunk_avx_vnni(CodeKind kind, const Chunk& chunk, const ByteRows& x, int n_rows,
                        float* sums) {
  KVZAP_FOR_CODE_KIND(kind, bytes256::add_by_vnni, chunk, x, n_rows, sums)
}
void unpack_chunk_avx2(CodeKind kind, const Chunk& chunk, float* target) {
  KVZAP_FOR_CODE_KIND(kind, bytes256::unpack_floats, chunk, target)
}

}  // namespace kvzap::linalg::quantised

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
#endif
