// Registers of bytes beside the Vec of their level, and dot products of bytes, for kernels that are
// written once for all instruction sets.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/byte_products.hpp"
#include "base/vec.hpp"

namespace kvzap::base {

/// One register of bytes, in words of four: as many words as a Vec V has lanes. With a Bytes B:
/// - B::load(p); B::all(byte); B::broadcast(p): the four bytes at p in each word; store(p, b)
/// - B::table(p): 16 bytes; look_up(table, b): table[b], for bytes below 16
/// - a & b, a ^ b; or_masked(a, b, mask): a | (b & mask)
/// - moved(b, n): pairs of bytes, as numbers of 16 bits, shifted by n to the left, or by -n to the
///   right
/// - floats_of<i, is_signed>(b): byte i of each word, as V
/// - B::floats(p): `lanes` bytes, signed or not, as V
/// - B::store_low(p, v): the low byte of each lane's bits, of 32 / lanes vectors of whole numbers
///   plus 1.5 * 2^23
template <class V>
struct Bytes;

/// Sums of 32 bits, as many as a Vec has lanes: zero(), all(n), a + b, a << n, floats_of(w).
template <class V>
struct Words;

/// Dot products of the words of two registers of bytes: codes and x. x has no -128. With a
/// ByteDots D:
/// - D::Codes, D::codes<is_signed>(b): codes ready for products. Unsigned codes are below 64.
/// - D::products: products of codes and x that a sum of 16 bits adds at each step; 0 if sums have
///   32 bits
/// - D::biased: signed codes must be given plus 128, and so dots begin with -128 * the sum of x
/// - D::begin(dots), D::add<is_signed>(sums, codes, x), D::end(dots, sums, D::ones()): dots +=
/// codes
///   . x, where 16 bits hold the sums of all steps between begin and end
/// - D::chains: independent sums that hide the latency of `add`
template <ByteProducts products>
struct ByteDots;

#if KVZAP_NEON

template <>
struct Bytes<Vec4> {
  int8x16_t v;

  KVZAP_BODY Bytes load(const std::uint8_t* p) { return {vreinterpretq_s8_u8(vld1q_u8(p))}; }
  KVZAP_BODY Bytes all(std::int8_t byte) { return {vdupq_n_s8(byte)}; }
  KVZAP_BODY Bytes broadcast(const std::int8_t* p) {
    std::int32_t four;
    std::memcpy(&four, p, sizeof(four));
    return {vreinterpretq_s8_s32(vdupq_n_s32(four))};
  }
  KVZAP_BODY Bytes table(const std::int8_t* p) { return {vld1q_s8(p)}; }
  KVZAP_BODY Vec4 floats(const std::uint8_t* p) {
    return {Float4{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]),
                   static_cast<float>(p[3])}};
  }
  KVZAP_BODY Vec4 floats(const std::int8_t* p) {
    return {Float4{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]),
                   static_cast<float>(p[3])}};
  }
  KVZAP_BODY void store_low(std::int8_t* p, const Vec4* x) {
    for (int i = 0; i < 8; i += 4) {
      const int16x8_t low = vcombine_s16(low_halves(x[i]), low_halves(x[i + 1]));
      const int16x8_t high = vcombine_s16(low_halves(x[i + 2]), low_halves(x[i + 3]));
      vst1q_s8(p + 4 * i, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
    }
  }

 private:
  KVZAP_BODY int16x4_t low_halves(Vec4 x) { return vmovn_s32((int32x4_t)x.v); }
};

using Bytes16 = Bytes<Vec4>;

KVZAP_BODY void store(std::uint8_t* p, Bytes16 b) { vst1q_u8(p, vreinterpretq_u8_s8(b.v)); }
KVZAP_BODY Bytes16 operator&(Bytes16 a, Bytes16 b) { return {vandq_s8(a.v, b.v)}; }
KVZAP_BODY Bytes16 operator^(Bytes16 a, Bytes16 b) { return {veorq_s8(a.v, b.v)}; }
KVZAP_BODY Bytes16 or_masked(Bytes16 a, Bytes16 b, Bytes16 mask) {
  return {vorrq_s8(a.v, vandq_s8(b.v, mask.v))};
}
KVZAP_BODY Bytes16 look_up(Bytes16 table, Bytes16 b) {
  return {vqtbl1q_s8(table.v, vreinterpretq_u8_s8(b.v))};
}
KVZAP_BODY Bytes16 moved(Bytes16 b, int n) {
  const int16x8_t by =
      vdupq_n_s16(static_cast<std::int16_t>(n));  // a negative count shifts to the right
  return {vreinterpretq_s8_u16(vshlq_u16(vreinterpretq_u16_s8(b.v), by))};
}

#else

using Char16 __attribute__((vector_size(16), may_alias)) = std::int8_t;
using Short8 __attribute__((vector_size(16), may_alias)) = std::int16_t;
using UShort8 __attribute__((vector_size(16), may_alias)) = std::uint16_t;
using AnyChar16 __attribute__((vector_size(16), may_alias, aligned(1))) = std::int8_t;

template <>
struct Bytes<Vec4> {
  Char16 v;

  KVZAP_BODY Bytes load(const std::uint8_t* p) { return {*reinterpret_cast<const AnyChar16*>(p)}; }
  KVZAP_BODY Bytes all(std::int8_t byte) { return {Char16{} + byte}; }
  KVZAP_BODY Bytes broadcast(const std::int8_t* p) {
    std::int32_t four;
    std::memcpy(&four, p, sizeof(four));
    return {reinterpret_cast<Char16>(Int4{four, four, four, four})};
  }
  KVZAP_BODY Bytes table(const std::int8_t* p) { return {*reinterpret_cast<const AnyChar16*>(p)}; }
  KVZAP_BODY Vec4 floats(const std::uint8_t* p) {
    alignas(16) const float x[4] = {static_cast<float>(p[0]), static_cast<float>(p[1]),
                                    static_cast<float>(p[2]), static_cast<float>(p[3])};
    return Vec4::load(x);
  }
  KVZAP_BODY Vec4 floats(const std::int8_t* p) {
    alignas(16) const float x[4] = {static_cast<float>(p[0]), static_cast<float>(p[1]),
                                    static_cast<float>(p[2]), static_cast<float>(p[3])};
    return Vec4::load(x);
  }
  KVZAP_BODY void store_low(std::int8_t* p, const Vec4* x) {
    for (int i = 0; i < 32; ++i) {
      const Int4 bits = reinterpret_cast<Int4>(x[i / 4].v);
      p[i] = static_cast<std::int8_t>(bits[i % 4]);
    }
  }
};

using Bytes16 = Bytes<Vec4>;

KVZAP_BODY void store(std::uint8_t* p, Bytes16 b) { *reinterpret_cast<Char16*>(p) = b.v; }
KVZAP_BODY Bytes16 operator&(Bytes16 a, Bytes16 b) { return {a.v & b.v}; }
KVZAP_BODY Bytes16 operator^(Bytes16 a, Bytes16 b) { return {a.v ^ b.v}; }
KVZAP_BODY Bytes16 or_masked(Bytes16 a, Bytes16 b, Bytes16 mask) { return {a.v | (b.v & mask.v)}; }
KVZAP_BODY Bytes16 look_up(Bytes16 table, Bytes16 b) {
  std::uint8_t values[16];
  std::uint64_t places[2];
  std::memcpy(values, &table, sizeof(values));
  std::memcpy(places, &b, sizeof(places));
  // Collect bytes in words: a vector cannot be loaded soon after its bytes were stored.
  for (std::uint64_t& eight : places) {
    std::uint64_t found = 0;
    for (int i = 0; i < 64; i += 8) found |= std::uint64_t{values[eight >> i & 15]} << i;
    eight = found;
  }
  std::memcpy(&b, places, sizeof(places));
  return b;
}
KVZAP_BODY Bytes16 moved(Bytes16 b, int n) {
  const auto pairs = reinterpret_cast<UShort8>(b.v);
  return {reinterpret_cast<Char16>(n >= 0 ? pairs << n : pairs >> -n)};
}

#endif

KVZAP_BODY Float4 to_floats(Int4 n) {
#if KVZAP_X86
  return reinterpret_cast<Float4>(_mm_cvtepi32_ps(reinterpret_cast<__m128i>(n)));
#elif KVZAP_NEON
  return (Float4)vcvtq_f32_s32((int32x4_t)n);
#else
  alignas(16) const float x[4] = {static_cast<float>(n[0]), static_cast<float>(n[1]),
                                  static_cast<float>(n[2]), static_cast<float>(n[3])};
  return Vec4::load(x).v;
#endif
}

template <int i, bool is_signed>
KVZAP_BODY Vec4 floats_of(Bytes16 b) {
  auto word = (Int4)b.v;
  if constexpr (is_signed) {
    word = word << (24 - 8 * i) >> 24;
  } else {
    word = word >> (8 * i) & 255;
  }
  return {to_floats(word)};
}

template <>
struct Words<Vec4> {
  Int4 v;

  KVZAP_BODY Words zero() { return {Int4{}}; }
  KVZAP_BODY Words all(std::int32_t n) { return {Int4{n, n, n, n}}; }
};
KVZAP_BODY Words<Vec4> operator+(Words<Vec4> a, Words<Vec4> b) { return {a.v + b.v}; }
KVZAP_BODY Words<Vec4> operator<<(Words<Vec4> a, int n) { return {a.v << n}; }
KVZAP_BODY Vec4 floats_of(Words<Vec4> w) { return {to_floats(w.v)}; }

template <>
struct ByteDots<ByteProducts::portable> {
  using Floats = Vec4;
  using Dots = Words<Vec4>;
  struct Ones {};
  static constexpr bool biased = false;
  static constexpr int chains = 1;
  KVZAP_BODY Ones ones() { return {}; }

#if KVZAP_NEON
  using Codes = Bytes16;
  struct Sums {
    int16x8_t low, high;
  };
  static constexpr int products = 1;

  template <bool is_signed>
  KVZAP_BODY Codes codes(Bytes16 b) {
    return b;
  }
  KVZAP_BODY Sums begin(Dots /*dots*/) { return {vdupq_n_s16(0), vdupq_n_s16(0)}; }
  template <bool is_signed>
  KVZAP_BODY Sums add(Sums sums, Codes codes, Bytes16 x) {
    return {vmlal_s8(sums.low, vget_low_s8(codes.v), vget_low_s8(x.v)),
            vmlal_high_s8(sums.high, codes.v, x.v)};
  }
  KVZAP_BODY Dots end(Dots dots, Sums sums, Ones /*ones*/) {
    return {dots.v + (Int4)vpaddq_s32(vpaddlq_s16(sums.low), vpaddlq_s16(sums.high))};
  }
#else
  /// The even and the odd bytes, as numbers of 16 bits.
  struct Codes {
    Short8 even, odd;
  };
  using Sums = Short8;
  static constexpr int products = 2;

  template <bool is_signed>
  KVZAP_BODY Codes codes(Bytes16 b) {
    const auto pairs = reinterpret_cast<Short8>(b.v);
    return {pairs << 8 >> 8, pairs >> 8};
  }
  KVZAP_BODY Sums begin(Dots /*dots*/) { return Short8{}; }
  template <bool is_signed>
  KVZAP_BODY Sums add(Sums sums, Codes own, Bytes16 x) {
    const Codes by = codes<true>(x);
    return sums + (own.even * by.even + own.odd * by.odd);
  }
  KVZAP_BODY Dots end(Dots dots, Sums sums, Ones /*ones*/) {
#if KVZAP_X86
    const __m128i both = _mm_madd_epi16(reinterpret_cast<__m128i>(sums), _mm_set1_epi16(1));
    return {dots.v + reinterpret_cast<Int4>(both)};
#else
    const auto both = reinterpret_cast<Int4>(sums);
    return {dots.v + (both << 16 >> 16) + (both >> 16)};
#endif
  }
#endif
};

#if KVZAP_NEON

#define KVZAP_INLINE_NEON_DOT KVZAP_TARGET_NEON_DOT static inline __attribute__((always_inline))

template <>
struct ByteDots<ByteProducts::neon_dot> {
  using Floats = Vec4;
  using Dots = Words<Vec4>;
  using Codes = Bytes16;
  using Sums = Dots;
  struct Ones {};
  static constexpr bool biased = false;
  static constexpr int products = 0, chains = 1;

  KVZAP_BODY Ones ones() { return {}; }
  template <bool is_signed>
  KVZAP_BODY Codes codes(Bytes16 b) {
    return b;
  }
  KVZAP_BODY Sums begin(Dots dots) { return dots; }
  template <bool is_signed>
  KVZAP_INLINE_NEON_DOT Sums add(Sums sums, Codes codes, Bytes16 x) {
    return {(Int4)vdotq_s32((int32x4_t)sums.v, codes.v, x.v)};
  }
  KVZAP_BODY Dots end(Dots /*dots*/, Sums sums, Ones /*ones*/) { return sums; }
};

#endif

#if KVZAP_X86

template <>
struct Bytes<Vec8> {
  __m256i v;

  KVZAP_INLINE_AVX2 Bytes load(const std::uint8_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
  }
  KVZAP_INLINE_AVX2 Bytes all(std::int8_t byte) { return {_mm256_set1_epi8(byte)}; }
  KVZAP_INLINE_AVX2 Bytes broadcast(const std::int8_t* p) {
    std::int32_t four = 0;
    std::memcpy(&four, p, sizeof(four));
    return {_mm256_set1_epi32(four)};
  }
  KVZAP_INLINE_AVX2 Bytes table(const std::int8_t* p) {
    return {_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  KVZAP_INLINE_AVX2 Vec8 floats(const std::uint8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes))};
  }
  KVZAP_INLINE_AVX2 Vec8 floats(const std::int8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))};
  }
  KVZAP_INLINE_AVX2 void store_low(std::int8_t* p, const Vec8* x) {
    // Packing interleaves the halves of its operands: words 0 4 1 5 2 6 3 7 become 0 to 7.
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(integers(x[0]), integers(x[1])),
                                             _mm256_packs_epi32(integers(x[2]), integers(x[3])));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(bytes, order));
  }

 private:
  KVZAP_INLINE_AVX2 __m256i integers(Vec8 x) {
    return _mm256_sub_epi32(_mm256_castps_si256(x.v), _mm256_set1_epi32(0x4b400000));
  }
};

using Bytes32 = Bytes<Vec8>;

KVZAP_INLINE_AVX2 void store(std::uint8_t* p, Bytes32 b) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(p), b.v);
}
KVZAP_INLINE_AVX2 Bytes32 operator&(Bytes32 a, Bytes32 b) { return {_mm256_and_si256(a.v, b.v)}; }
KVZAP_INLINE_AVX2 Bytes32 operator^(Bytes32 a, Bytes32 b) { return {_mm256_xor_si256(a.v, b.v)}; }
KVZAP_INLINE_AVX2 Bytes32 or_masked(Bytes32 a, Bytes32 b, Bytes32 mask) {
  return {_mm256_or_si256(a.v, _mm256_and_si256(b.v, mask.v))};
}
KVZAP_INLINE_AVX2 Bytes32 look_up(Bytes32 table, Bytes32 b) {
  return {_mm256_shuffle_epi8(table.v, b.v)};
}
KVZAP_INLINE_AVX2 Bytes32 moved(Bytes32 b, int n) {
  return {n >= 0 ? _mm256_slli_epi16(b.v, n) : _mm256_srli_epi16(b.v, -n)};
}
template <int i, bool is_signed>
KVZAP_INLINE_AVX2 Vec8 floats_of(Bytes32 b) {
  __m256i word = b.v;
  if constexpr (is_signed) {
    word = _mm256_srai_epi32(_mm256_slli_epi32(word, 24 - 8 * i), 24);
  } else {
    word = _mm256_and_si256(_mm256_srli_epi32(word, 8 * i), _mm256_set1_epi32(255));
  }
  return {_mm256_cvtepi32_ps(word)};
}

template <>
struct Words<Vec8> {
  __m256i v;

  KVZAP_INLINE_AVX2 Words zero() { return {_mm256_setzero_si256()}; }
  KVZAP_INLINE_AVX2 Words all(std::int32_t n) { return {_mm256_set1_epi32(n)}; }
};
KVZAP_INLINE_AVX2 Words<Vec8> operator+(Words<Vec8> a, Words<Vec8> b) {
  return {_mm256_add_epi32(a.v, b.v)};
}
KVZAP_INLINE_AVX2 Words<Vec8> operator<<(Words<Vec8> a, int n) {
  return {_mm256_slli_epi32(a.v, n)};
}
KVZAP_INLINE_AVX2 Vec8 floats_of(Words<Vec8> w) { return {_mm256_cvtepi32_ps(w.v)}; }

/// Sums of pairs in 16 bits. Signed codes are multiplied as |code| * (x with the code's sign): at
/// most 128 * 127, so that a pair fits.
template <>
struct ByteDots<ByteProducts::avx2> {
  using Floats = Vec8;
  using Dots = Words<Vec8>;
  struct Codes {
    __m256i codes, magnitude;
  };
  struct Sums {
    __m256i v;
  };
  struct Ones {
    __m256i v;
  };
  static constexpr bool biased = false;
  static constexpr int products = 2, chains = 1;

  KVZAP_INLINE_AVX2 Ones ones() { return {_mm256_set1_epi16(1)}; }
  /// In a register: GCC would read them from memory each time.
  KVZAP_INLINE_AVX2 Ones ones_in_register() {
    Ones ones{_mm256_set1_epi16(1)};
    asm("" : "+x"(ones.v));
    return ones;
  }
  template <bool is_signed>
  KVZAP_INLINE_AVX2 Codes codes(Bytes32 b) {
    return {b.v, is_signed ? _mm256_abs_epi8(b.v) : b.v};
  }
  KVZAP_INLINE_AVX2 Sums begin(Dots /*dots*/) { return {_mm256_setzero_si256()}; }
  template <bool is_signed>
  KVZAP_INLINE_AVX2 Sums add(Sums sums, Codes codes, Bytes32 x) {
    return {_mm256_add_epi16(sums.v, pairs<is_signed>(codes, x))};
  }
  KVZAP_INLINE_AVX2 Dots end(Dots dots, Sums sums, Ones ones) {
    return {_mm256_add_epi32(dots.v, _mm256_madd_epi16(sums.v, ones.v))};
  }
  // The same in place: GCC would add into another register, and run out of them.
  template <bool is_signed>
  KVZAP_INLINE_AVX2 void add_to(Sums& sums, Codes codes, Bytes32 x) {
    asm("vpaddw %1, %0, %0" : "+x"(sums.v) : "x"(pairs<is_signed>(codes, x)));
  }
  KVZAP_INLINE_AVX2 void end_to(Dots& dots, Sums sums, Ones ones) {
    asm("vpaddd %1, %0, %0" : "+x"(dots.v) : "x"(_mm256_madd_epi16(sums.v, ones.v)));
  }

 private:
  template <bool is_signed>
  KVZAP_INLINE_AVX2 __m256i pairs(Codes codes, Bytes32 x) {
    return _mm256_maddubs_epi16(codes.magnitude,
                                is_signed ? _mm256_sign_epi8(x.v, codes.codes) : x.v);
  }
};

#if KVZAP_AVX_VNNI

#define KVZAP_INLINE_AVX_VNNI KVZAP_TARGET_AVX_VNNI static inline __attribute__((always_inline))

template <>
struct ByteDots<ByteProducts::avx_vnni> {
  using Floats = Vec8;
  using Dots = Words<Vec8>;
  using Codes = Bytes32;
  using Sums = Dots;
  struct Ones {};
  static constexpr bool biased = true;
  static constexpr int products = 0, chains = 1;

  KVZAP_INLINE_AVX2 Ones ones() { return {}; }
  template <bool is_signed>
  KVZAP_INLINE_AVX2 Codes codes(Bytes32 b) {
    return b;
  }
  KVZAP_INLINE_AVX2 Sums begin(Dots dots) { return dots; }
  template <bool is_signed>
  KVZAP_INLINE_AVX_VNNI Sums add(Sums sums, Codes codes, Bytes32 x) {
    return {_mm256_dpbusd_avx_epi32(sums.v, codes.v, x.v)};
  }
  KVZAP_INLINE_AVX2 Dots end(Dots /*dots*/, Sums sums, Ones /*ones*/) { return sums; }
};

#endif

template <>
struct Bytes<Vec16> {
  __m512i v;

  KVZAP_INLINE_AVX512 Bytes load(const std::uint8_t* p) { return {_mm512_loadu_si512(p)}; }
  KVZAP_INLINE_AVX512 Bytes all(std::int8_t byte) { return {_mm512_set1_epi8(byte)}; }
  KVZAP_INLINE_AVX512 Bytes broadcast(const std::int8_t* p) {
    std::int32_t four = 0;
    std::memcpy(&four, p, sizeof(four));
    return {_mm512_set1_epi32(four)};
  }
  KVZAP_INLINE_AVX512 Bytes table(const std::int8_t* p) {
    return {_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  KVZAP_INLINE_AVX512 Vec16 floats(const std::uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))};
  }
  KVZAP_INLINE_AVX512 Vec16 floats(const std::int8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
  }
  KVZAP_INLINE_AVX512 void store_low(std::int8_t* p, const Vec16* x) {
    for (int i = 0; i < 2; ++i) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p) + i,
                       _mm512_cvtepi32_epi8(_mm512_castps_si512(x[i].v)));
    }
  }
};

using Bytes64 = Bytes<Vec16>;

KVZAP_INLINE_AVX512 void store(std::uint8_t* p, Bytes64 b) { _mm512_store_si512(p, b.v); }
KVZAP_INLINE_AVX512 Bytes64 operator&(Bytes64 a, Bytes64 b) { return {_mm512_and_si512(a.v, b.v)}; }
KVZAP_INLINE_AVX512 Bytes64 operator^(Bytes64 a, Bytes64 b) { return {_mm512_xor_si512(a.v, b.v)}; }
KVZAP_INLINE_AVX512 Bytes64 or_masked(Bytes64 a, Bytes64 b, Bytes64 mask) {
  return {_mm512_ternarylogic_epi32(a.v, b.v, mask.v, 0xf8)};
}
KVZAP_INLINE_AVX512 Bytes64 look_up(Bytes64 table, Bytes64 b) {
  return {_mm512_shuffle_epi8(table.v, b.v)};
}
KVZAP_INLINE_AVX512 Bytes64 moved(Bytes64 b, int n) {
  return {n >= 0 ? _mm512_slli_epi16(b.v, n) : _mm512_srli_epi16(b.v, -n)};
}
template <int i, bool is_signed>
KVZAP_INLINE_AVX512 Vec16 floats_of(Bytes64 b) {
  __m512i word = b.v;
  if constexpr (is_signed) {
    if (i < 3) word = _mm512_slli_epi32(word, 24 - 8 * i);
    word = _mm512_srai_epi32(word, 24);
  } else {
    if (i > 0) word = _mm512_srli_epi32(word, 8 * i);
    if (i < 3) word = _mm512_and_si512(word, _mm512_set1_epi32(255));
  }
  return {_mm512_cvtepi32_ps(word)};
}

template <>
struct Words<Vec16> {
  __m512i v;

  KVZAP_INLINE_AVX512 Words zero() { return {_mm512_setzero_si512()}; }
  KVZAP_INLINE_AVX512 Words all(std::int32_t n) { return {_mm512_set1_epi32(n)}; }
};
KVZAP_INLINE_AVX512 Words<Vec16> operator+(Words<Vec16> a, Words<Vec16> b) {
  return {_mm512_add_epi32(a.v, b.v)};
}
KVZAP_INLINE_AVX512 Words<Vec16> operator<<(Words<Vec16> a, int n) {
  return {_mm512_slli_epi32(a.v, n)};
}
KVZAP_INLINE_AVX512 Vec16 floats_of(Words<Vec16> w) { return {_mm512_cvtepi32_ps(w.v)}; }

#define KVZAP_INLINE_AVX512_VNNI \
  KVZAP_TARGET_AVX512_VNNI static inline __attribute__((always_inline))

template <>
struct ByteDots<ByteProducts::avx512_vnni> {
  using Floats = Vec16;
  using Dots = Words<Vec16>;
  using Codes = Bytes64;
  using Sums = Dots;
  struct Ones {};
  static constexpr bool biased = true;
  static constexpr int products = 0, chains = 2;

  KVZAP_INLINE_AVX512 Ones ones() { return {}; }
  template <bool is_signed>
  KVZAP_INLINE_AVX512 Codes codes(Bytes64 b) {
    return b;
  }
  KVZAP_INLINE_AVX512 Sums begin(Dots dots) { return dots; }
  template <bool is_signed>
  KVZAP_INLINE_AVX512_VNNI Sums add(Sums sums, Codes codes, Bytes64 x) {
    return {_mm512_dpbusd_epi32(sums.v, codes.v, x.v)};
  }
  KVZAP_INLINE_AVX512 Dots end(Dots /*dots*/, Sums sums, Ones /*ones*/) { return sums; }
};

#endif

}  // namespace kvzap::base
