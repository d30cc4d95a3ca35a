// Helpers of the vectorized attention kernels: padding, exp, and the shift of a softmax.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>

#include "base/simd.hpp"

namespace kvzap::attention {

/// Returns `count` rounded up to a multiple of `unit`.
constexpr std::int64_t whole(std::int64_t count, std::int64_t unit) {
  return (count + unit - 1) / unit * unit;
}

}  // namespace kvzap::attention

#if KVZAP_X86
#if !defined(__clang__)
// GCC's own intrinsics start from variables that they leave undefined on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#define KVZAP_INLINE_AVX2 KVZAP_TARGET_AVX2 static inline __attribute__((always_inline))
#define KVZAP_INLINE_AVX512 KVZAP_TARGET_AVX512 static inline __attribute__((always_inline))
#define KVZAP_INLINE_AVX512_BF16 \
  KVZAP_TARGET_AVX512_BF16 static inline __attribute__((always_inline))

namespace kvzap::attention {

/// Returns lanes first + i < count of 8 as a mask.
KVZAP_INLINE_AVX2 __m256i lanes_before(int count, int first) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count - first), index);
}

/// Returns exp(x) for x <= 0 within 2 units in the last place (Cephes' expf); 0 where it would be
/// subnormal, NaN for NaN.
KVZAP_INLINE_AVX512 __m512 exp_nonpositive(__m512 x) {
  const __m512 lowest = _mm512_set1_ps(-87.3f);
  const __mmask16 normal = _mm512_cmp_ps_mask(x, lowest, _CMP_NLT_UQ);  // NaN counts
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_maskz_scalef_ps(normal, p, n);
}

KVZAP_INLINE_AVX2 __m256 exp_nonpositive(__m256 x) {
  const __m256 lowest = _mm256_set1_ps(-87.3f);
  const __m256 normal = _mm256_cmp_ps(x, lowest, _CMP_NLT_UQ);  // NaN counts
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fmadd_ps(n, _mm256_set1_ps(2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.9875691500e-4f);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
  p = _mm256_fmadd_ps(_mm256_mul_ps(p, r), r, _mm256_add_ps(r, _mm256_set1_ps(1.0f)));
  // 2^n, n > -127. A NaN stays in p.
  const __m256i power =
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_and_ps(normal, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
}

/// Returns 2^x within 2.2 units in the last place, 0 for -infinity, NaN for NaN. Evaluates a
/// polynomial on [0, 1); x - floor(x) and the multiplication by 2^floor(x) are one instruction
/// each.
KVZAP_INLINE_AVX512 __m512 exp2_of(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(0x1.ec320ap-10f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.26900cp-7f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.c95446p-5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.ebd5a8p-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.62e4f6p-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.fffffep-1f));
  return _mm512_scalef_ps(p, x);
}

/// The same as shift_of for one float (attention/softmax.hpp).
KVZAP_INLINE_AVX2 __m256 shift_of(__m256 maximum) {
  const __m256 none = _mm256_set1_ps(-__builtin_inff());
  return _mm256_and_ps(_mm256_cmp_ps(maximum, none, _CMP_NEQ_UQ), maximum);
}
KVZAP_INLINE_AVX512 __m512 shift_of(__m512 maximum) {
  const __m512 none = _mm512_set1_ps(-__builtin_inff());
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(maximum, none, _CMP_NEQ_UQ), maximum);
}

// Loads of 16 elements of a row as a register of floats.
struct FloatOps {
  using Value = float;
  KVZAP_INLINE_AVX512 __m512 load(const float* p, std::uint32_t mask) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), p);
  }
};

struct HalfOps {
  using Value = half;
  KVZAP_INLINE_AVX512 __m512 load(const half* p, std::uint32_t mask) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(static_cast<__mmask16>(mask), p));
  }
};

struct WideBfloatOps {
  using Value = bfloat16;
  KVZAP_INLINE_AVX512 __m512 load(const bfloat16* p, std::uint32_t mask) {
    const __m256i bits = _mm256_maskz_loadu_epi16(static_cast<__mmask16>(mask), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
};

}  // namespace kvzap::attention
#endif
