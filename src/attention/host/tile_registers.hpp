// AMX's tile registers, and arrays that emulate them.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention/host/vector_math.hpp"

#if KVZAP_X86
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result): offsets within a tile
namespace kvzap::attention {

// All eight registers have 16 rows of 64 bytes. In memory a tile is 1 KiB without gaps: rows that
// are a power of two apart would share few cache sets.
inline constexpr int tile_bytes = 1024;
using TileBytes = char[tile_bytes];

#if KVZAP_X86_TILES
/// The registers themselves. Their shape belongs to the thread: see TileScope.
struct TileRegisters {
  template <int tile>
  KVZAP_INLINE_AVX512_BF16 void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(tile));
  }
  template <int tile>
  KVZAP_INLINE_AVX512_BF16 void load(const char* source) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
                 :
                 : "r"(source), "r"(std::int64_t{64}), "i"(tile),
                   "m"(*reinterpret_cast<const TileBytes*>(source)));
  }
  /// For data that is read once before it leaves the level-1 cache: reused data stays there.
  template <int tile>
  KVZAP_INLINE_AVX512_BF16 void load_once(const char* source) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2"
                 :
                 : "r"(source), "r"(std::int64_t{64}), "i"(tile),
                   "m"(*reinterpret_cast<const TileBytes*>(source)));
  }
  template <int tile>
  KVZAP_INLINE_AVX512_BF16 void store(char* target) {  // NOLINT(readability-non-const-parameter)
    asm volatile("tilestored %%tmm%c3, (%1,%2,1)"
                 : "=m"(*reinterpret_cast<TileBytes*>(target))
                 : "r"(target), "r"(std::int64_t{64}), "i"(tile));
  }
  /// sums (16, 16 floats) += a (16, 32 bf16) * b (16 pairs, 16 columns).
  template <int sums, int a, int b>
  KVZAP_INLINE_AVX512_BF16 void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(a), "i"(b));
  }
  /// The same for half, TDPFP16PS: in bytes, as assemblers before binutils 2.40 do not know it.
  template <int sums, int a, int b>
  KVZAP_INLINE_AVX512_BF16 void multiply_halves() {
    asm volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1"
                 :
                 : "i"((~b & 15) << 3 | 3), "i"(0xc0 | sums << 3 | a));
  }
};
#endif

/// Arrays, for tests on processors without AMX.
struct EmulatedTiles {
  template <int tile>
  KVZAP_INLINE_AVX512_BF16 void zero() {
    std::memset(registers[tile], 0, tile_bytes);
  }
  template <int tile>
  KVZAP_INLINE_AVX512_BF16 void load(const char* source) {
    std::memcpy(registers[tile], source, tile_bytes);
  }
  template <int tile>
  KVZAP_INLINE_AVX512_BF16 void load_once(const char* source) {
    load<tile>(source);
  }
  template <int tile>
  KVZAP_INLINE_AVX512_BF16 void store(char* target) {
    std::memcpy(target, registers[tile], tile_bytes);
  }
  template <int sums, int a, int b>
  KVZAP_INLINE_AVX512_BF16 void multiply() {
    multiply(registers[sums], registers[a], registers[b]);
  }
  template <int sums, int a, int b>
  KVZAP_INLINE_AVX512_BF16 void multiply_halves() {
    multiply_halves(registers[sums], registers[a], registers[b]);
  }

 private:
  KVZAP_TARGET_AVX512_BF16 static void multiply(float* sums, const float* a, const float* b) {
    for (int row = 0; row < 16; ++row) {
      __m512 sum = _mm512_load_ps(sums + row * 16);
      for (int pair = 0; pair < 16; ++pair) {
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_ps(a[row * 16 + pair]),
                               (__m512bh)_mm512_load_ps(b + pair * 16));
      }
      _mm512_store_ps(sums + row * 16, sum);
    }
  }

  KVZAP_TARGET_AVX512_BF16 static void multiply_halves(float* sums, const float* a,
                                                       const float* b) {
    for (int pair = 0; pair < 16; ++pair) {
      const __m512i column = (__m512i)_mm512_load_ps(b + pair * 16);
      const __m512 even = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(column));
      const __m512 odd = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(column, 16)));
      for (int row = 0; row < 16; ++row) {
        short halves[2];
        std::memcpy(halves, a + row * 16 + pair, sizeof(halves));
        __m512 sum = _mm512_load_ps(sums + row * 16);
        sum = _mm512_fmadd_ps(_mm512_cvtph_ps(_mm256_set1_epi16(halves[0])), even, sum);
        sum = _mm512_fmadd_ps(_mm512_cvtph_ps(_mm256_set1_epi16(halves[1])), odd, sum);
        _mm512_store_ps(sums + row * 16, sum);
      }
    }
  }

  alignas(64) static inline thread_local float registers[8][tile_bytes / sizeof(float)];
};

}  // namespace kvzap::attention
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
#endif
