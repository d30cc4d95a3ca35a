#include "attention/host/tile_kernels.hpp"

#include <cmath>
#include <type_traits>

#include "attention/host/amx_prefill.hpp"
#include "attention/host/vector_math.hpp"
#include "attention/softmax.hpp"
#include "base/machine.hpp"

// Within a block of rows that a kernel works on, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

#define KVZAP_LEVEL_BODY "attention/host/tile_kernels.inc"
#include "base/each_level.hpp"

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)

namespace kvzap::attention {

bool TileKernels::available() {
  return KVZAP_NEON || (KVZAP_X86 && base::machine().has(base::SimdLevel::avx2));
}

TileKernels TileKernels::of([[maybe_unused]] bool bfloat_rows) {
#if KVZAP_X86
  const base::SimdLevel level = base::machine().simd();
  if (bfloat_rows && level >= base::SimdLevel::avx512_bf16) {
    return avx512_bf16::tile_kernels<avx512_bf16::P>();
  }
  if (level >= base::SimdLevel::avx512) return avx512::tile_kernels<void>();
  if (level >= base::SimdLevel::avx2) return avx2::tile_kernels<void>();
#elif KVZAP_NEON
  if (bfloat_rows && base::machine().has(base::SimdLevel::neon_bf16)) {
    return neon_bf16::tile_kernels<neon_bf16::P>();
  }
#endif
  return baseline::tile_kernels<void>();
}

TileScope::TileScope()
    : m_has_tiles(KVZAP_X86_TILES && base::machine().has(base::SimdLevel::amx_bf16)) {
#if KVZAP_X86_TILES
  if (!m_has_tiles) return;
  struct alignas(64) Configuration {
    std::uint8_t palette = 1, start = 0, reserved[14] = {};
    std::uint16_t bytes[16] = {};
    std::uint8_t rows[16] = {};
  };
  Configuration configuration;
  for (int i = 0; i < 8; ++i) {
    configuration.bytes[i] = 64;
    configuration.rows[i] = 16;
  }
  asm volatile("ldtilecfg %0" : : "m"(configuration));
#endif
}

TileScope::~TileScope() {
#if KVZAP_X86_TILES
  if (m_has_tiles) asm volatile("tilerelease");
#endif
}

}  // namespace kvzap::attention
