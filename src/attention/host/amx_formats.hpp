// The number formats that prefill with tiles multiplies: their packing, rounding and summing.
#pragma once

#include <cstdint>

#include "attention/host/amx_prefill.hpp"
#include "attention/host/tile_registers.hpp"
#include "base/simd.hpp"

#if KVZAP_X86
namespace kvzap::attention {

/// Operations of a format. Packed: the type of a tile's values. headroom, large: see Kernels.
/// round: rounds two vectors of 16 floats to all parts. take_apart: splits 32 values of rows into
/// parts. sum_of: the sum of both vectors after rounding.
template <class Format>
struct AmxFormat;

template <>
struct AmxFormat<BfloatTiles> {
  using Packed = bfloat16;
  static constexpr float headroom = 0;
  static constexpr float large = 0x1p30f;
  KVZAP_INLINE_AVX512_BF16 void round(__m512 first, __m512 second, __m512i* parts) {
    parts[0] = (__m512i)_mm512_cvtne2ps_pbh(second, first);
  }
  KVZAP_INLINE_AVX512_BF16 void take_apart(__m512i values, __m512i* parts) { parts[0] = values; }
  KVZAP_INLINE_AVX512_BF16 __m512 sum_of(const __m512i* parts) {
    // (VDPBF16PS with ones would be slower.)
    return _mm512_add_ps((__m512)_mm512_slli_epi32(parts[0], 16),
                         (__m512)_mm512_and_si512(parts[0], _mm512_set1_epi32(-65536)));
  }
  template <class Tiles, int sums, int a, int b>
  KVZAP_INLINE_AVX512_BF16 void multiply() {
    Tiles::template multiply<sums, a, b>();
  }
};

template <>
struct AmxFormat<HalfTiles> {
  using Packed = half;
  static constexpr float headroom = 6;
  static constexpr float large = 0x1p15f;
  KVZAP_INLINE_AVX512_BF16 void round(__m512 first, __m512 second, __m512i* parts) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    parts[0] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(first, nearest)),
                                  _mm512_cvtps_ph(second, nearest), 1);
  }
  KVZAP_INLINE_AVX512_BF16 void take_apart(__m512i values, __m512i* parts) { parts[0] = values; }
  KVZAP_INLINE_AVX512_BF16 __m512 sum_of(const __m512i* parts) {
    return _mm512_add_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(parts[0])),
                         _mm512_cvtph_ps(_mm512_extracti64x4_epi64(parts[0], 1)));
  }
  template <class Tiles, int sums, int a, int b>
  KVZAP_INLINE_AVX512_BF16 void multiply() {
    Tiles::template multiply_halves<sums, a, b>();
  }
};

template <>
struct AmxFormat<SplitHalfTiles> {
  using Packed = bfloat16;
  static constexpr float headroom = 0;
  static constexpr float large = 0x1p30f;
  KVZAP_INLINE_AVX512_BF16 void round(__m512 first, __m512 second, __m512i* parts) {
    const __m512i high = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    const __m512 first_high = widen(_mm512_castsi512_si256(high));
    const __m512 second_high = widen(_mm512_extracti64x4_epi64(high, 1));
    const __mmask16 first_odd = not_finite(first_high), second_odd = not_finite(second_high);
    // A value that is not finite is stored in the low part; the high part has only its sign.
    // Products then equal those of the whole value, and never become infinity times 0 or infinity
    // minus infinity.
    const __m512 first_low =
        _mm512_mask_mov_ps(_mm512_sub_ps(first, first_high), first_odd, first_high);
    const __m512 second_low =
        _mm512_mask_mov_ps(_mm512_sub_ps(second, second_high), second_odd, second_high);
    const __mmask32 odd = static_cast<std::uint32_t>(second_odd) << 16 | first_odd;
    const __m512i signs = _mm512_and_si512(high, _mm512_set1_epi16(-0x8000));
    constexpr short one = 0x3f80;
    parts[0] = _mm512_mask_mov_epi16(high, odd, _mm512_or_si512(signs, _mm512_set1_epi16(one)));
    parts[1] = (__m512i)_mm512_cvtne2ps_pbh(second_low, first_low);
  }
  KVZAP_INLINE_AVX512_BF16 void take_apart(__m512i values, __m512i* parts) {
    round(_mm512_cvtph_ps(_mm512_castsi512_si256(values)),
          _mm512_cvtph_ps(_mm512_extracti64x4_epi64(values, 1)), parts);
  }
  KVZAP_INLINE_AVX512_BF16 __m512 sum_of(const __m512i* parts) {
    return _mm512_add_ps(AmxFormat<BfloatTiles>::sum_of(parts),
                         AmxFormat<BfloatTiles>::sum_of(parts + 1));
  }
  template <class Tiles, int sums, int a, int b>
  KVZAP_INLINE_AVX512_BF16 void multiply() {
    Tiles::template multiply<sums, a, b>();
  }

 private:
  KVZAP_INLINE_AVX512_BF16 __m512 widen(__m256i values) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16);
  }
  KVZAP_INLINE_AVX512_BF16 __mmask16 not_finite(__m512 x) {
    constexpr int nan_or_infinite = 0x99;
    return _mm512_fpclass_ps_mask(x, nan_or_infinite);
  }
};

}  // namespace kvzap::attention
#endif
