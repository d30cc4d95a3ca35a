// Loads one row as float, or as operands of TileKernels.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

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

/// Loads a row to `words` floats, with zeros after its last dimension. pairs: bfloat16 values keep
/// their type (TileKernels::pairs).
template <class Value>
void load_operand(const Value* source, std::int64_t stride, int dim, [[maybe_unused]] bool pairs,
                  float* target, int words) {
  if constexpr (std::is_same_v<Value, bfloat16>) {
    if (pairs) {
      auto* const row = reinterpret_cast<bfloat16*>(target);
      if (stride == 1) {
        std::memcpy(row, source, dim * sizeof(Value));
      } else {
        for (int d = 0; d < dim; ++d) row[d] = source[d * stride];
      }
      std::memset(row + dim, 0, words * sizeof(float) - dim * sizeof(Value));
      return;
    }
  }
  load_row(source, stride, target, dim);
  std::fill(target + dim, target + words, 0.0f);
}

}  // namespace kvzap::attention
