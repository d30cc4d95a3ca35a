#include "attention/host/tile_kernels.hpp"

#include "attention/host/amx_prefill.hpp"
#include "attention/host/tile_products.hpp"
#include "attention/host/tile_products_avx2.hpp"
#include "base/machine.hpp"

namespace kvzap::attention {

bool TileKernels::available() { return KVZAP_X86 && base::machine().has(base::SimdLevel::avx2); }

TileKernels TileKernels::of([[maybe_unused]] bool bfloat_rows) {
  TileKernels kernels;
#if KVZAP_X86
  const base::SimdLevel level = base::machine().simd();
  if (level >= base::SimdLevel::avx512) {
    kernels.pairs = bfloat_rows && level >= base::SimdLevel::avx512_bf16;
    kernels.rows = block_rows(kernels.pairs);
    kernels.columns = block_vectors(kernels.pairs) * 16;
    kernels.product = kernels.pairs ? multiply_pairs<6, 4> : multiply_floats<12, 2>;
    kernels.narrow = kernels.pairs ? multiply_pairs<6, 1> : multiply_floats<12, 1>;
  } else if (level >= base::SimdLevel::avx2) {
    kernels.by_avx2 = true;
    kernels.rows = avx2_block_rows;
    kernels.columns = avx2_block_columns;
    kernels.product = multiply_floats_avx2;
    kernels.narrow = multiply_floats_avx2;
  }
#endif
  return kernels;
}

void TileKernels::pack([[maybe_unused]] const float* keys, [[maybe_unused]] int padded_keys,
                       [[maybe_unused]] int words, [[maybe_unused]] float* target) const {
#if KVZAP_X86
  if (by_avx2) {
    pack_keys_avx2(keys, padded_keys, words, target);
  } else {
    pack_keys(keys, padded_keys, words, columns, target);
  }
#endif
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
