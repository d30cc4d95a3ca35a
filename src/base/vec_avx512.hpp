// The part of vec.hpp for AVX-512.
#pragma once

#include "base/vec.hpp"

#if KVZAP_X86

#define KVZAP_INLINE_AVX512 KVZAP_TARGET_AVX512 static inline __attribute__((always_inline))
#define KVZAP_INLINE_AVX512_BF16 \
  KVZAP_TARGET_AVX512_BF16 static inline __attribute__((always_inline))

namespace kvzap::base {

template <>
struct Vec<SimdLevel::avx512> {
  static constexpr int lanes = 16, registers = 32;
  struct Mask {
    __mmask16 m;
  };
  __m512 v;

  KVZAP_INLINE_AVX512 Vec zero() { return {_mm512_setzero_ps()}; }
  KVZAP_INLINE_AVX512 Vec all(float x) { return {_mm512_set1_ps(x)}; }
  KVZAP_INLINE_AVX512 Vec load(const float* p) { return {_mm512_load_ps(p)}; }
  KVZAP_INLINE_AVX512 Vec load_unaligned(const float* p) { return {_mm512_loadu_ps(p)}; }
  KVZAP_INLINE_AVX512 Vec load_first(const float* p, int count) {
    return {_mm512_maskz_loadu_ps(first(count).m, p)};
  }
  KVZAP_INLINE_AVX512 Mask first(int count) {
    return {static_cast<__mmask16>(count < 0 ? 0u : count >= 16 ? 0xffffu : (1u << count) - 1)};
  }

  KVZAP_INLINE_AVX512 Wide<Vec> load_wide(const float* p) {
    return {load_unaligned(p), load_unaligned(p + 16)};
  }
  KVZAP_INLINE_AVX512 Vec load_narrow(const float* p) { return load_unaligned(p); }
  KVZAP_INLINE_AVX512 Vec load_narrow(const half* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  KVZAP_INLINE_AVX512 Vec load_narrow(const bfloat16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
  }
  KVZAP_INLINE_AVX512 Wide<Vec> load_wide(const half* p) {
    const auto* halves = reinterpret_cast<const __m256i*>(p);
    return {{_mm512_cvtph_ps(_mm256_loadu_si256(halves))},
            {_mm512_cvtph_ps(_mm256_loadu_si256(halves + 1))}};
  }
  KVZAP_INLINE_AVX512 Wide<Vec> load_wide(const bfloat16* p) {
    return widened(p, _mm512_loadu_si512(p));
  }
  KVZAP_INLINE_AVX512 Wide<Vec> load_wide(const float* p, int count) {
    return {load_first(p, count), load_first(p + 16, count - 16)};
  }
  template <class Value>
  KVZAP_INLINE_AVX512 Wide<Vec> load_wide(const Value* p, int count) {
    return widened(p, _mm512_maskz_loadu_epi16((1u << count) - 1, p));
  }
  template <class Value>
  KVZAP_INLINE_AVX512 Vec load_high(const Value* p) {
    return load_wide(p).high;
  }

  template <int step>
  KVZAP_INLINE_AVX512 Vec fold_two(Vec a, Vec b) {
    if constexpr (step == 1) {
      return {_mm512_add_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v))};
    } else if constexpr (step == 2) {
      const __m512d x = _mm512_castps_pd(a.v), y = _mm512_castps_pd(b.v);
      return {_mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                            _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)))};
    } else {
      return {_mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x88),
                            _mm512_shuffle_f32x4(a.v, b.v, 0xdd))};
    }
  }

  KVZAP_INLINE_AVX512 void transpose(const float* source, std::int64_t source_stride, float* target,
                                     std::int64_t target_stride) {
    __m512 a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(source + i * source_stride);
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
      _mm512_storeu_ps(target + k * target_stride, _mm512_shuffle_f32x4(b[k], b[4 + k], 0x88));
      _mm512_storeu_ps(target + (8 + k) * target_stride,
                       _mm512_shuffle_f32x4(b[k], b[4 + k], 0xdd));
      _mm512_storeu_ps(target + (4 + k) * target_stride,
                       _mm512_shuffle_f32x4(b[8 + k], b[12 + k], 0x88));
      _mm512_storeu_ps(target + (12 + k) * target_stride,
                       _mm512_shuffle_f32x4(b[8 + k], b[12 + k], 0xdd));
    }
  }

 private:
  KVZAP_INLINE_AVX512 Wide<Vec> widened(const half* /*type*/, __m512i bits) {
    return {{_mm512_cvtph_ps(_mm512_castsi512_si256(bits))},
            {_mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1))}};
  }
  KVZAP_INLINE_AVX512 Wide<Vec> widened(const bfloat16* /*type*/, __m512i bits) {
    const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return {{_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))},
            {_mm512_castsi512_ps(_mm512_and_si512(bits, odd))}};
  }
};

using Vec16 = Vec<SimdLevel::avx512>;

KVZAP_INLINE_AVX512 void store(float* p, Vec16 x) { _mm512_store_ps(p, x.v); }
KVZAP_INLINE_AVX512 void store_unaligned(float* p, Vec16 x) { _mm512_storeu_ps(p, x.v); }
KVZAP_INLINE_AVX512 void store_four(float* p, Vec16 x) {
  store_four(p, Vec8{_mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1))});
}
KVZAP_INLINE_AVX512 Vec16 operator+(Vec16 a, Vec16 b) { return {_mm512_add_ps(a.v, b.v)}; }
KVZAP_INLINE_AVX512 Vec16 operator-(Vec16 a, Vec16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
KVZAP_INLINE_AVX512 Vec16 operator*(Vec16 a, Vec16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
KVZAP_INLINE_AVX512 Vec16 fma(Vec16 a, Vec16 b, Vec16 c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
KVZAP_INLINE_AVX512 Vec16 fms(Vec16 a, Vec16 b, Vec16 c) {
  return {_mm512_fmsub_ps(a.v, b.v, c.v)};
}
KVZAP_INLINE_AVX512 Vec16 fnma(Vec16 a, Vec16 b, Vec16 c) {
  return {_mm512_fnmadd_ps(a.v, b.v, c.v)};
}
KVZAP_INLINE_AVX512 Vec16 max(Vec16 a, Vec16 b) { return {_mm512_max_ps(a.v, b.v)}; }
KVZAP_INLINE_AVX512 Vec16 abs(Vec16 x) { return {_mm512_abs_ps(x.v)}; }
KVZAP_INLINE_AVX512 Vec16::Mask operator>(Vec16 a, Vec16 b) {
  return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)};
}
KVZAP_INLINE_AVX512 Vec16::Mask not_less(Vec16 a, Vec16 b) {
  return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_NLT_UQ)};
}
KVZAP_INLINE_AVX512 Vec16::Mask differs(Vec16 a, Vec16 b) {
  return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_NEQ_UQ)};
}
KVZAP_INLINE_AVX512 Vec16 rounded(Vec16 x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i nearest = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __m512i either = _mm512_mask_blend_epi32(differs(x, x).m, nearest, quiet);
  return {_mm512_castsi512_ps(_mm512_and_si512(either, _mm512_set1_epi32(-0x10000)))};
}
KVZAP_INLINE_AVX512 void store_halves(half* p, Vec16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
KVZAP_INLINE_AVX512 float first_lane(Vec16 x) { return _mm512_cvtss_f32(x.v); }
KVZAP_INLINE_AVX512 bool any(Vec16::Mask m) { return m.m != 0; }
KVZAP_INLINE_AVX512 Vec16 keep(Vec16::Mask m, Vec16 x) { return {_mm512_maskz_mov_ps(m.m, x.v)}; }
KVZAP_INLINE_AVX512 Vec16 select(Vec16::Mask m, Vec16 a, Vec16 b) {
  return {_mm512_mask_mov_ps(b.v, m.m, a.v)};
}
KVZAP_INLINE_AVX512 Vec16 nearest(Vec16 x) {
  return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
KVZAP_INLINE_AVX512 Vec16 times_power_of_two(Vec16::Mask m, Vec16 x, Vec16 n) {
  return {_mm512_maskz_scalef_ps(m.m, x.v, n.v)};
}
/// x - floor(x)
KVZAP_INLINE_AVX512 Vec16 fraction(Vec16 x) {
  return {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
}
/// x * 2^floor(n)
KVZAP_INLINE_AVX512 Vec16 times_power_of_floor(Vec16 x, Vec16 n) {
  return {_mm512_scalef_ps(x.v, n.v)};
}
template <int width>
KVZAP_INLINE_AVX512 Vec16 swap(Vec16 x) {
  if constexpr (width >= 4) {
    return {_mm512_shuffle_f32x4(x.v, x.v, width == 8 ? 0x4e : 0xb1)};
  } else {
    return {_mm512_permute_ps(x.v, width == 2 ? 0x4e : 0xb1)};
  }
}

KVZAP_INLINE_AVX512 float total(Vec16 x) {
  return total(Vec8{_mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1))});
}

/// Two vectors' width of bfloat16 values in pairs, for dot products of pairs.
struct Pairs32 {
  __m512i v;

  KVZAP_INLINE_AVX512_BF16 Pairs32 load(const bfloat16* p) { return {_mm512_loadu_si512(p)}; }
  KVZAP_INLINE_AVX512_BF16 Pairs32 load(const bfloat16* p, int count) {
    return {_mm512_maskz_loadu_epi16((1u << count) - 1, p)};
  }
  KVZAP_INLINE_AVX512_BF16 Pairs32 all(std::uint32_t pair) {
    return {_mm512_set1_epi32(static_cast<int>(pair))};
  }
  KVZAP_INLINE_AVX512_BF16 Pairs32 rounded(Vec16 low, Vec16 high) {
    return {(__m512i)_mm512_cvtne2ps_pbh(high.v, low.v)};
  }
  /// Returns the pairs (a[i], b[i]); zipped_lane(i) is the lane of pair i in
  /// both vectors.
  KVZAP_INLINE_AVX512_BF16 Wide<Pairs32> zip(Pairs32 a, Pairs32 b) {
    return {{_mm512_unpacklo_epi16(a.v, b.v)}, {_mm512_unpackhi_epi16(a.v, b.v)}};
  }
  static constexpr int zipped_lane(int i) { return i / 4 % 2 * 16 + i / 8 * 4 + i % 4; }
  /// Stores the pairs of 16 values each.
  KVZAP_INLINE_AVX512_BF16 void interleave(const bfloat16* even, const bfloat16* odd,
                                           float* target) {
    const __m512i low =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even)));
    const __m512i high =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd)));
    _mm512_store_si512(target, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
  /// Returns value order[i] in place i.
  KVZAP_INLINE_AVX512_BF16 Pairs32 permuted(Pairs32 x, const std::uint16_t* order) {
    return {_mm512_permutexvar_epi16(_mm512_load_si512(order), x.v)};
  }
};
KVZAP_INLINE_AVX512_BF16 void store(float* p, Pairs32 x) { _mm512_store_si512(p, x.v); }
KVZAP_INLINE_AVX512_BF16 void store_unaligned(bfloat16* p, Pairs32 x) {
  _mm512_storeu_si512(p, x.v);
}
/// sum + the products of a's and b's pairs; subnormal numbers count as 0.
KVZAP_INLINE_AVX512_BF16 Vec16 dot(Pairs32 a, Pairs32 b, Vec16 sum) {
  return {_mm512_dpbf16_ps(sum.v, (__m512bh)a.v, (__m512bh)b.v)};
}

template <>
struct Level<SimdLevel::avx512_bf16> {
  using Floats = Vec16;
  using Pairs = Pairs32;
};

}  // namespace kvzap::base

#endif
