// Which products the processor and the build have, as the routes of linear maps depend on them.
#pragma once

#include "base/kokkos_compat.hpp"
#include "base/machine.hpp"
#include "base/simd.hpp"
#include "linalg/host/packed_kernels.hpp"
#include "linalg/product.hpp"

namespace kvzap::linalg {

/// Whether this processor has kernels for packed weights.
inline bool has_packed_products() { return base::runs_on_host && has_packed_kernels(); }

/// Whether bf16 weights are multiplied by dot products of bf16 pairs.
inline bool has_bf16_products() {
  return has_packed_products() && base::machine().has(KVZAP_NEON ? base::SimdLevel::neon_bf16
                                                                 : base::SimdLevel::avx512_bf16);
}

/// Whether products run on operands of the weights' type, without waiting for the instance.
inline bool keeps_type() {
  return has_product_library() || (base::runs_on_host && base::machine().on_device());
}

}  // namespace kvzap::linalg
