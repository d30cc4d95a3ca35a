// Loads one row as float.
#pragma once

#include "base/kokkos_compat.hpp"
#include "linalg/host/row_kernels.hpp"

namespace kvzap::attention {

/// target[d] = float(source[d * stride]) for d < dim
template <class Value>
KOKKOS_INLINE_FUNCTION void load_row(const Value* source, std::int64_t stride, float* target,
                                     int dim) {
  if constexpr (base::runs_on_host) {
    if (stride == 1) return linalg::widen(source, target, dim);
  }
  for (int d = 0; d < dim; ++d) target[d] = static_cast<float>(source[d * stride]);
}

}  // namespace kvzap::attention
