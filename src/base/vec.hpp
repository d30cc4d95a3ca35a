// Vectors of floats, for kernels that are written once for all instruction sets.
//
// Vec<level> is one register. All levels have the same operations, so a kernel's body is one text,
// which base/each_level.hpp compiles once for each level. Where an instruction set has an
// instruction for a larger step of a body, its level has an operation for it that others lack.
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/simd.hpp"

#if KVZAP_X86
#if !defined(__clang__)
// GCC's own intrinsics start from variables that they leave undefined on
// purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#elif KVZAP_NEON
#include <arm_neon.h>
#endif

namespace kvzap {
struct half;
struct bfloat16;
}  // namespace kvzap

namespace kvzap::base {

/// One register of floats. Operations of all levels, with a Vec V and its mask M:
/// - V::zero(), V::all(x), V::load(p) of an aligned p, V::load_unaligned(p), store(p, v)
/// - V::first(count): the lanes before `count`, as M
/// - a + b, a - b, a * b
/// - fma(a, b, c): a * b + c; fms(a, b, c): a * b - c; fnma(a, b, c): c - a * b; rounded once if
///   the level has FMA
/// - max(a, b): b if one is NaN; abs(v)
/// - a > b, not_less(a, b) (true for NaN), differs(a, b): M
/// - any(m); keep(m, v): 0 elsewhere; select(m, a, b)
/// - nearest(v): the nearest whole number, for |v| < 2^22
/// - times_power_of_two(m, v, n): v * 2^n for whole numbers -127 < n < 128 where m, elsewhere 0
/// - V::load_wide(p), V::load_wide(p, count): 2 * lanes values of float, half or bfloat16; of
///   `count` < 2 * lanes, the others are 0 and not read
/// - V::load_narrow(p): `lanes` values of float, half or bfloat16; store_halves(p, v): as half
/// - rounded(v): to bfloat16, as its constructor rounds
/// - V::load_high(p): the second half of them, for bodies that use one half after the other
/// - V::fold_two<step>(a, b): adds neighbouring groups of lanes of each and interleaves the sums.
///   In log2(lanes) steps, from 1, `lanes` vectors become one whose lane i is the sum of vector i
/// - store_four(p, v): the sum of all groups of four lanes
/// - total(v): the sum of all lanes, of halves and then of their halves, as a float
/// - swap<width>(v): neighbouring groups of `width` lanes exchanged; first_lane(v) as a float
/// - V::transpose(source, source_stride, target, target_stride) for lanes x lanes words
template <SimdLevel level>
struct Vec;

/// The vectors of a level. Pairs: void if it has no dot product of pairs of
/// bfloat16.
template <SimdLevel level>
struct Level {
  using Floats = Vec<level>;
  using Pairs = void;
};

/// 2 * lanes values of a row as floats. Value i is in lane lane_of<V, Value>(i)
/// of both vectors together.
template <class V>
struct Wide {
  V low, high;
};

/// bfloat16 values are widened to the even values and the odd values: one
/// instruction each.
template <class V, class Value>
constexpr int lane_of(int i) {
  return std::is_same_v<Value, bfloat16> ? i % 2 * V::lanes + i / 2 : i;
}

// The baseline of every architecture: four lanes.

using Float4 __attribute__((vector_size(16), may_alias)) = float;
using Int4 __attribute__((vector_size(16), may_alias)) = std::int32_t;
using AnyFloat4 __attribute__((vector_size(16), may_alias, aligned(4))) = float;
using AnyInt4 __attribute__((vector_size(16), may_alias, aligned(2))) = std::int32_t;

template <>
struct Vec<SimdLevel::baseline> {
  static constexpr int lanes = 4;
#if KVZAP_X86
  static constexpr int registers = 16;
#else
  static constexpr int registers = 32;
#endif
  struct Mask {
    Int4 m;
  };
  Float4 v;

  KVZAP_BODY Vec all(float x) { return {Float4{x, x, x, x}}; }
  KVZAP_BODY Vec zero() { return all(0); }
  KVZAP_BODY Vec load(const float* p) { return {*reinterpret_cast<const Float4*>(p)}; }
  KVZAP_BODY Vec load_unaligned(const float* p) { return {*reinterpret_cast<const AnyFloat4*>(p)}; }
  KVZAP_BODY Vec load_first(const float* p, int count) {
    alignas(16) float values[4] = {};
    for (int i = 0; i < count && i < 4; ++i) values[i] = p[i];
    return load(values);
  }
  KVZAP_BODY Mask first(int count) { return {Int4{count, count, count, count} > Int4{0, 1, 2, 3}}; }

  KVZAP_BODY Wide<Vec> load_wide(const float* p) {
    return {load_unaligned(p), load_unaligned(p + 4)};
  }
  KVZAP_BODY Wide<Vec> load_wide(const bfloat16* p) {
    const Int4 bits = *reinterpret_cast<const AnyInt4*>(p);
    return {{reinterpret_cast<Float4>(bits << 16)},
            {reinterpret_cast<Float4>(bits & static_cast<std::int32_t>(0xffff0000u))}};
  }
  KVZAP_BODY Vec load_narrow(const float* p) { return load_unaligned(p); }
  KVZAP_BODY Vec load_narrow(const half* p) {
#if KVZAP_NEON
    const uint16x4_t halves = vld1_u16(reinterpret_cast<const std::uint16_t*>(p));
    return {(Float4)vcvt_f32_f16(vreinterpret_f16_u16(halves))};
#else
    return {widened(load_words(p))};
#endif
  }
  KVZAP_BODY Vec load_narrow(const bfloat16* p) {
    return {reinterpret_cast<Float4>(load_words(p) << 16)};
  }
  KVZAP_BODY Wide<Vec> load_wide(const half* p) { return {load_narrow(p), load_narrow(p + 4)}; }
  template <class Value>
  KVZAP_BODY Wide<Vec> load_wide(const Value* p, int count) {
    using Bits = std::conditional_t<sizeof(Value) == 2, std::uint16_t, float>;
    alignas(16) Bits values[8] = {};
    for (int i = 0; i < count; ++i) values[i] = reinterpret_cast<const Bits*>(p)[i];
    return load_wide(reinterpret_cast<const Value*>(values));
  }
  template <class Value>
  KVZAP_BODY Vec load_high(const Value* p) {
    return load_wide(p).high;
  }

  template <int step>
  KVZAP_BODY Vec fold_two(Vec a, Vec b) {
#if KVZAP_NEON
    return {(Float4)vpaddq_f32((float32x4_t)a.v, (float32x4_t)b.v)};
#elif KVZAP_X86
    if constexpr (step == 1) {
      return {_mm_add_ps(_mm_unpacklo_ps(a.v, b.v), _mm_unpackhi_ps(a.v, b.v))};
    } else {
      return {_mm_add_ps(_mm_movelh_ps(a.v, b.v), _mm_movehl_ps(b.v, a.v))};
    }
#else
    // Not as a vector's initializer: nvcc's front end turns one in a template into wrong C++.
    alignas(16)
        const float sums[4] = {a.v[0] + a.v[1], a.v[2] + a.v[3], b.v[0] + b.v[1], b.v[2] + b.v[3]};
    return load(sums);
#endif
  }

  KVZAP_BODY void transpose(const float* source, std::int64_t source_stride, float* target,
                            std::int64_t target_stride) {
    for (int j = 0; j < 4; ++j) {
      const float* const column = source + j;
      *reinterpret_cast<AnyFloat4*>(target + j * target_stride) = Float4{
          column[0], column[source_stride], column[2 * source_stride], column[3 * source_stride]};
    }
  }

 private:
  /// Values of 16 bits as words.
  KVZAP_BODY Int4 load_words(const void* p) {
#if KVZAP_NEON
    return (Int4)vmovl_u16(vld1_u16(static_cast<const std::uint16_t*>(p)));
#elif KVZAP_X86
    const __m128i values = _mm_loadl_epi64(static_cast<const __m128i*>(p));
    return (Int4)_mm_unpacklo_epi16(values, _mm_setzero_si128());
#else
    const auto* bits = static_cast<const std::uint16_t*>(p);
    return Int4{bits[0], bits[1], bits[2], bits[3]};
#endif
  }
  /// Halves in the lower bits of words as floats, as half's conversion.
  KVZAP_BODY Vec widened(Int4 bits) {
    const Int4 exponent = bits & 0x7c00;
    const Int4 special = (exponent == 0x7c00) & 0x7f800000;
    const Int4 sign = (bits & 0x8000) << 16;
    const Float4 scaled = reinterpret_cast<Float4>((bits & 0x7fff) << 13) * 0x1p112f;
    return {reinterpret_cast<Float4>(reinterpret_cast<Int4>(scaled) | special | sign)};
  }
};

using Vec4 = Vec<SimdLevel::baseline>;

KVZAP_BODY void store(float* p, Vec4 x) { *reinterpret_cast<Float4*>(p) = x.v; }
KVZAP_BODY void store_unaligned(float* p, Vec4 x) { *reinterpret_cast<AnyFloat4*>(p) = x.v; }
KVZAP_BODY void store_four(float* p, Vec4 x) { store(p, x); }
KVZAP_BODY Vec4 operator+(Vec4 a, Vec4 b) { return {a.v + b.v}; }
KVZAP_BODY Vec4 operator-(Vec4 a, Vec4 b) { return {a.v - b.v}; }
KVZAP_BODY Vec4 operator*(Vec4 a, Vec4 b) { return {a.v * b.v}; }
KVZAP_BODY Vec4::Mask operator>(Vec4 a, Vec4 b) { return {a.v > b.v}; }
KVZAP_BODY Vec4::Mask not_less(Vec4 a, Vec4 b) { return {~(a.v < b.v)}; }
KVZAP_BODY Vec4::Mask differs(Vec4 a, Vec4 b) { return {a.v != b.v}; }
KVZAP_BODY Vec4 keep(Vec4::Mask m, Vec4 x) {
  return {reinterpret_cast<Float4>(m.m & reinterpret_cast<Int4>(x.v))};
}
KVZAP_BODY Vec4 select(Vec4::Mask m, Vec4 a, Vec4 b) {
  return {reinterpret_cast<Float4>((m.m & reinterpret_cast<Int4>(a.v)) |
                                   (~m.m & reinterpret_cast<Int4>(b.v)))};
}
KVZAP_BODY Vec4 abs(Vec4 x) {
  return {reinterpret_cast<Float4>(reinterpret_cast<Int4>(x.v) & 0x7fffffff)};
}
KVZAP_BODY Vec4 rounded(Vec4 x) {
  const Int4 bits = reinterpret_cast<Int4>(x.v);
  const Int4 nearest = bits + 0x7fff + (bits >> 16 & 1);
  const Vec4 either = select(differs(x, x), {reinterpret_cast<Float4>(bits | 0x400000)},
                             {reinterpret_cast<Float4>(nearest)});
  return {reinterpret_cast<Float4>(reinterpret_cast<Int4>(either.v) & -0x10000)};
}
KVZAP_BODY void store_halves(half* p, Vec4 x) {
  auto* const target = reinterpret_cast<std::uint16_t*>(p);
#if KVZAP_NEON
  vst1_u16(target, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x.v)));
#else
  // As half's constructor.
  const Int4 bits = reinterpret_cast<Int4>(x.v);
  const Int4 magnitude = bits & 0x7fffffff;
  const Int4 subnormal = reinterpret_cast<Int4>(reinterpret_cast<Float4>(magnitude) + 0.5f);
  const Int4 normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const Int4 is_small = magnitude < 0x38800000, is_large = magnitude >= 0x477ff000;
  const Int4 is_nan = magnitude > 0x7f800000;
  Int4 words = (is_small & (subnormal - 0x3f000000)) | (~is_small & normal);
  words = (is_large & 0x7c00) | (~is_large & words) | (is_nan & 0x200) | (bits >> 16 & 0x8000);
#if KVZAP_X86
  const __m128i narrow = reinterpret_cast<__m128i>(words << 16 >> 16);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(target), _mm_packs_epi32(narrow, narrow));
#else
  for (int i = 0; i < 4; ++i) target[i] = static_cast<std::uint16_t>(words[i]);
#endif
#endif
}
KVZAP_BODY float first_lane(Vec4 x) { return x.v[0]; }
KVZAP_BODY Vec4 nearest(Vec4 x) {
  const Vec4 magic = Vec4::all(0x1.8p23f);  // adding it leaves the whole number
  return (x + magic) - magic;
}
KVZAP_BODY Vec4 times_power_of_two(Vec4::Mask m, Vec4 x, Vec4 n) {
  const Int4 biased = reinterpret_cast<Int4>((n + Vec4::all(0x1.8p23f + 127)).v);
  return keep(m, {x.v * reinterpret_cast<Float4>(biased << 23)});
}
#if KVZAP_NEON
KVZAP_BODY Vec4 fma(Vec4 a, Vec4 b, Vec4 c) {
  return {(Float4)vfmaq_f32((float32x4_t)c.v, (float32x4_t)a.v, (float32x4_t)b.v)};
}
KVZAP_BODY Vec4 fms(Vec4 a, Vec4 b, Vec4 c) {
  return {(Float4)vnegq_f32(vfmsq_f32((float32x4_t)c.v, (float32x4_t)a.v, (float32x4_t)b.v))};
}
KVZAP_BODY Vec4 fnma(Vec4 a, Vec4 b, Vec4 c) {
  return {(Float4)vfmsq_f32((float32x4_t)c.v, (float32x4_t)a.v, (float32x4_t)b.v)};
}
KVZAP_BODY bool any(Vec4::Mask m) { return vmaxvq_u32((uint32x4_t)m.m) != 0; }
#else
KVZAP_BODY Vec4 fma(Vec4 a, Vec4 b, Vec4 c) { return {c.v + a.v * b.v}; }
KVZAP_BODY Vec4 fms(Vec4 a, Vec4 b, Vec4 c) { return {a.v * b.v - c.v}; }
KVZAP_BODY Vec4 fnma(Vec4 a, Vec4 b, Vec4 c) { return {c.v - a.v * b.v}; }
KVZAP_BODY bool any(Vec4::Mask m) { return (m.m[0] | m.m[1] | m.m[2] | m.m[3]) != 0; }
#endif
#if KVZAP_X86
KVZAP_BODY Vec4 max(Vec4 a, Vec4 b) { return {_mm_max_ps(a.v, b.v)}; }
template <int width>
KVZAP_BODY Vec4 swap(Vec4 x) {
  return {_mm_shuffle_ps(x.v, x.v, width == 2 ? 0x4e : 0xb1)};
}
#else
KVZAP_BODY Vec4 max(Vec4 a, Vec4 b) { return select(a > b, a, b); }
template <int width>
KVZAP_BODY Vec4 swap(Vec4 x) {
  return {Float4{x.v[width], x.v[width ^ 1], x.v[width ^ 2], x.v[width ^ 3]}};
}
#endif

KVZAP_BODY float total(Vec4 x) {
  x = x + swap<2>(x);
  return first_lane(x + swap<1>(x));
}

#if KVZAP_NEON

#define KVZAP_INLINE_NEON_BF16 KVZAP_TARGET_NEON_BF16 static inline __attribute__((always_inline))

/// See Pairs32.
struct Pairs8 {
  uint16x8_t v;

  KVZAP_INLINE_NEON_BF16 Pairs8 load(const bfloat16* p) {
    return {vld1q_u16(reinterpret_cast<const std::uint16_t*>(p))};
  }
  KVZAP_INLINE_NEON_BF16 Pairs8 load(const bfloat16* p, int count) {
    std::uint16_t values[8] = {};
    for (int i = 0; i < count; ++i) values[i] = reinterpret_cast<const std::uint16_t*>(p)[i];
    return {vld1q_u16(values)};
  }
  KVZAP_INLINE_NEON_BF16 Pairs8 all(std::uint32_t pair) {
    uint32x4_t words = vdupq_n_u32(pair);
    asm(""
        : "+w"(words));  // GCC 12 makes constants of bfloat16 halves of the same
                         // value
    return {vreinterpretq_u16_u32(words)};
  }
  KVZAP_INLINE_NEON_BF16 Pairs8 rounded(Vec4 low, Vec4 high) {
    const bfloat16x8_t half = vcvtq_low_bf16_f32((float32x4_t)low.v);
    return {vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(half, (float32x4_t)high.v))};
  }
  KVZAP_INLINE_NEON_BF16 Wide<Pairs8> zip(Pairs8 a, Pairs8 b) {
    return {{vzip1q_u16(a.v, b.v)}, {vzip2q_u16(a.v, b.v)}};
  }
  static constexpr int zipped_lane(int i) { return i; }
  KVZAP_INLINE_NEON_BF16 void interleave(const bfloat16* even, const bfloat16* odd, float* target) {
    for (int i = 0; i < 16; i += 8) {
      const Wide<Pairs8> both = zip(load(even + i), load(odd + i));
      vst1q_u16(reinterpret_cast<std::uint16_t*>(target + i), both.low.v);
      vst1q_u16(reinterpret_cast<std::uint16_t*>(target + i + 4), both.high.v);
    }
  }
  KVZAP_INLINE_NEON_BF16 Pairs8 permuted(Pairs8 x, const std::uint16_t* order) {
    const uint8x16_t low = vreinterpretq_u8_u16(vmulq_n_u16(vld1q_u16(order), 0x0202));
    const uint8x16_t bytes = vaddq_u8(low, vreinterpretq_u8_u16(vdupq_n_u16(0x0100)));
    return {vreinterpretq_u16_u8(vqtbl1q_u8(vreinterpretq_u8_u16(x.v), bytes))};
  }
};
KVZAP_INLINE_NEON_BF16 void store(float* p, Pairs8 x) {
  vst1q_u16(reinterpret_cast<std::uint16_t*>(p), x.v);
}
KVZAP_INLINE_NEON_BF16 void store_unaligned(bfloat16* p, Pairs8 x) {
  vst1q_u16(reinterpret_cast<std::uint16_t*>(p), x.v);
}
KVZAP_INLINE_NEON_BF16 Vec4 dot(Pairs8 a, Pairs8 b, Vec4 sum) {
  return {(Float4)vbfdotq_f32((float32x4_t)sum.v, vreinterpretq_bf16_u16(a.v),
                              vreinterpretq_bf16_u16(b.v))};
}

template <>
struct Level<SimdLevel::neon_bf16> {
  using Floats = Vec4;
  using Pairs = Pairs8;
};

#endif

#if KVZAP_X86

#define KVZAP_INLINE_AVX2 KVZAP_TARGET_AVX2 static inline __attribute__((always_inline))

template <>
struct Vec<SimdLevel::avx2> {
  static constexpr int lanes = 8, registers = 16;
  struct Mask {
    __m256i m;
  };
  __m256 v;

  KVZAP_INLINE_AVX2 Vec zero() { return {_mm256_setzero_ps()}; }
  KVZAP_INLINE_AVX2 Vec all(float x) { return {_mm256_set1_ps(x)}; }
  KVZAP_INLINE_AVX2 Vec load(const float* p) { return {_mm256_load_ps(p)}; }
  KVZAP_INLINE_AVX2 Vec load_unaligned(const float* p) { return {_mm256_loadu_ps(p)}; }
  KVZAP_INLINE_AVX2 Vec load_first(const float* p, int count) {
    return {_mm256_maskload_ps(p, first(count).m)};
  }
  KVZAP_INLINE_AVX2 Mask first(int count) {
    return {_mm256_cmpgt_epi32(_mm256_set1_epi32(count), index())};
  }

  KVZAP_INLINE_AVX2 Wide<Vec> load_wide(const float* p) {
    return {load_unaligned(p), load_unaligned(p + 8)};
  }
  KVZAP_INLINE_AVX2 Vec load_narrow(const float* p) { return load_unaligned(p); }
  KVZAP_INLINE_AVX2 Vec load_narrow(const half* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  KVZAP_INLINE_AVX2 Vec load_narrow(const bfloat16* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
  }
  KVZAP_INLINE_AVX2 Wide<Vec> load_wide(const half* p) {
    const auto* halves = reinterpret_cast<const __m128i*>(p);
    return {{_mm256_cvtph_ps(_mm_loadu_si128(halves))},
            {_mm256_cvtph_ps(_mm_loadu_si128(halves + 1))}};
  }
  KVZAP_INLINE_AVX2 Wide<Vec> load_wide(const bfloat16* p) {
    return widened(p, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  KVZAP_INLINE_AVX2 Wide<Vec> load_wide(const float* p, int count) {
    return {{_mm256_maskload_ps(p, first(count).m)},
            {_mm256_maskload_ps(p + 8, first(count - 8).m)}};
  }
  template <class Value>
  KVZAP_INLINE_AVX2 Wide<Vec> load_wide(const Value* p, int count) {
    const auto* const words = reinterpret_cast<const int*>(p);
    __m256i bits = _mm256_maskload_epi32(words, first(count / 2).m);
    if (count % 2 != 0) {
      // The first half of the word after the whole words.
      const int last = reinterpret_cast<const std::uint16_t*>(p)[count - 1];
      const __m256i here = _mm256_cmpeq_epi32(_mm256_set1_epi32(count / 2), index());
      bits = _mm256_or_si256(bits, _mm256_and_si256(here, _mm256_set1_epi32(last)));
    }
    return widened(p, bits);
  }

  template <class Value>
  KVZAP_INLINE_AVX2 Vec load_high(const Value* p) {
    return load_wide(p).high;
  }
  KVZAP_INLINE_AVX2 Vec load_high(const bfloat16* p) {
    // Load the mask from memory: in a register it would push out the other
    // operand of a product, which GCC then loads once per product.
    alignas(32) static constexpr std::uint32_t odd[8] = {0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                         0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                         0xffff0000u, 0xffff0000u};
    __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    asm("vpand %1, %0, %0" : "+x"(bits) : "m"(odd));
    return {_mm256_castsi256_ps(bits)};
  }

  template <int step>
  KVZAP_INLINE_AVX2 Vec fold_two(Vec a, Vec b) {
    if constexpr (step == 1) {
      return {_mm256_add_ps(_mm256_unpacklo_ps(a.v, b.v), _mm256_unpackhi_ps(a.v, b.v))};
    } else if constexpr (step == 2) {
      const __m256d x = _mm256_castps_pd(a.v), y = _mm256_castps_pd(b.v);
      return {_mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)),
                            _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)))};
    } else {
      return {_mm256_add_ps(_mm256_permute2f128_ps(a.v, b.v, 0x20),
                            _mm256_permute2f128_ps(a.v, b.v, 0x31))};
    }
  }

  KVZAP_INLINE_AVX2 void transpose(const float* source, std::int64_t source_stride, float* target,
                                   std::int64_t target_stride) {
    __m256 a[8], b[8];
    // Halves of rows i and i + 4 side by side, so that later steps need not
    // cross 128-bit lanes.
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const float* const near = source + i * source_stride;
      const float* const far = source + (i + 4) * source_stride;
      a[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(near)), _mm_loadu_ps(far), 1);
      a[4 + i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(near + 4)),
                                      _mm_loadu_ps(far + 4), 1);
    }
#pragma GCC unroll 2
    for (int h = 0; h < 8; h += 4) {
      const __m256d even_low = _mm256_castps_pd(_mm256_unpacklo_ps(a[h], a[h + 1]));
      const __m256d even_high = _mm256_castps_pd(_mm256_unpackhi_ps(a[h], a[h + 1]));
      const __m256d odd_low = _mm256_castps_pd(_mm256_unpacklo_ps(a[h + 2], a[h + 3]));
      const __m256d odd_high = _mm256_castps_pd(_mm256_unpackhi_ps(a[h + 2], a[h + 3]));
      b[h] = _mm256_castpd_ps(_mm256_unpacklo_pd(even_low, odd_low));
      b[h + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(even_low, odd_low));
      b[h + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(even_high, odd_high));
      b[h + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(even_high, odd_high));
    }
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) _mm256_storeu_ps(target + j * target_stride, b[j]);
  }

 private:
  KVZAP_INLINE_AVX2 __m256i index() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
  KVZAP_INLINE_AVX2 Wide<Vec> widened(const half* /*type*/, __m256i bits) {
    return {{_mm256_cvtph_ps(_mm256_castsi256_si128(bits))},
            {_mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1))}};
  }
  KVZAP_INLINE_AVX2 Wide<Vec> widened(const bfloat16* /*type*/, __m256i bits) {
    const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16))},
            {_mm256_castsi256_ps(_mm256_and_si256(bits, odd))}};
  }
};

using Vec8 = Vec<SimdLevel::avx2>;

KVZAP_INLINE_AVX2 void store(float* p, Vec8 x) { _mm256_store_ps(p, x.v); }
KVZAP_INLINE_AVX2 void store_four(float* p, Vec8 x) {
  _mm_store_ps(p, _mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1)));
}
KVZAP_INLINE_AVX2 void store_unaligned(float* p, Vec8 x) { _mm256_storeu_ps(p, x.v); }
KVZAP_INLINE_AVX2 Vec8 operator+(Vec8 a, Vec8 b) { return {_mm256_add_ps(a.v, b.v)}; }
KVZAP_INLINE_AVX2 Vec8 operator-(Vec8 a, Vec8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
KVZAP_INLINE_AVX2 Vec8 operator*(Vec8 a, Vec8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
KVZAP_INLINE_AVX2 Vec8 fma(Vec8 a, Vec8 b, Vec8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
KVZAP_INLINE_AVX2 Vec8 fms(Vec8 a, Vec8 b, Vec8 c) { return {_mm256_fmsub_ps(a.v, b.v, c.v)}; }
KVZAP_INLINE_AVX2 Vec8 fnma(Vec8 a, Vec8 b, Vec8 c) { return {_mm256_fnmadd_ps(a.v, b.v, c.v)}; }
KVZAP_INLINE_AVX2 Vec8 max(Vec8 a, Vec8 b) { return {_mm256_max_ps(a.v, b.v)}; }
KVZAP_INLINE_AVX2 Vec8 abs(Vec8 x) {
  return {_mm256_and_ps(x.v, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)))};
}
KVZAP_INLINE_AVX2 Vec8::Mask operator>(Vec8 a, Vec8 b) {
  return {_mm256_castps_si256(_mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ))};
}
KVZAP_INLINE_AVX2 Vec8::Mask not_less(Vec8 a, Vec8 b) {
  return {_mm256_castps_si256(_mm256_cmp_ps(a.v, b.v, _CMP_NLT_UQ))};
}
KVZAP_INLINE_AVX2 Vec8::Mask differs(Vec8 a, Vec8 b) {
  return {_mm256_castps_si256(_mm256_cmp_ps(a.v, b.v, _CMP_NEQ_UQ))};
}
KVZAP_INLINE_AVX2 Vec8 rounded(Vec8 x) {
  const __m256i bits = _mm256_castps_si256(x.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i nearest = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 either = _mm256_blendv_ps(_mm256_castsi256_ps(nearest), _mm256_castsi256_ps(quiet),
                                         _mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
  return {_mm256_and_ps(either, _mm256_castsi256_ps(_mm256_set1_epi32(-0x10000)))};
}
KVZAP_INLINE_AVX2 void store_halves(half* p, Vec8 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
KVZAP_INLINE_AVX2 float first_lane(Vec8 x) { return _mm256_cvtss_f32(x.v); }
KVZAP_INLINE_AVX2 bool any(Vec8::Mask m) {
  return _mm256_movemask_ps(_mm256_castsi256_ps(m.m)) != 0;
}
KVZAP_INLINE_AVX2 Vec8 keep(Vec8::Mask m, Vec8 x) {
  return {_mm256_and_ps(_mm256_castsi256_ps(m.m), x.v)};
}
KVZAP_INLINE_AVX2 Vec8 select(Vec8::Mask m, Vec8 a, Vec8 b) {
  return {_mm256_blendv_ps(b.v, a.v, _mm256_castsi256_ps(m.m))};
}
KVZAP_INLINE_AVX2 Vec8 nearest(Vec8 x) {
  return {_mm256_round_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
KVZAP_INLINE_AVX2 Vec8 times_power_of_two(Vec8::Mask m, Vec8 x, Vec8 n) {
  const __m256i power =
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
  return keep(m, {_mm256_mul_ps(x.v, _mm256_castsi256_ps(power))});
}
template <int width>
KVZAP_INLINE_AVX2 Vec8 swap(Vec8 x) {
  if constexpr (width == 4) {
    // With Zen 1, vperm2f128 takes eight operations, this three.
    return {_mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x.v), 0x4e))};
  } else {
    return {_mm256_permute_ps(x.v, width == 2 ? 0x4e : 0xb1)};
  }
}

KVZAP_INLINE_AVX2 float total(Vec8 x) {
  return total(Vec4{_mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1))});
}

#endif

}  // namespace kvzap::base

#if KVZAP_X86
#include "base/vec_avx512.hpp"
#endif
