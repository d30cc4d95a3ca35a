#include "attention/host/decode_rows.hpp"

#include <type_traits>

#include "attention/host/row_blocks.hpp"
#include "attention/host/vector_math.hpp"

// Within a block of rows that a kernel works on, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

#define KVZAP_LEVEL_BODY "attention/host/decode_kernels.inc"
#include "base/each_level.hpp"

namespace kvzap::attention {

template <class Value>
const RowKernels<Value>* RowKernels<Value>::of([[maybe_unused]] base::SimdLevel level) {
#if KVZAP_X86
  if constexpr (std::is_same_v<Value, bfloat16>) {
    if (level >= base::SimdLevel::avx512_bf16) return &avx512_bf16::row_kernels<Value>;
  }
  if (level >= base::SimdLevel::avx512) return &avx512::row_kernels<Value>;
  if (level == base::SimdLevel::avx2) return &avx2::row_kernels<Value>;
#elif KVZAP_NEON
  if constexpr (std::is_same_v<Value, bfloat16>) {
    if (level >= base::SimdLevel::neon_bf16) return &neon_bf16::row_kernels<Value>;
  }
#endif
  return &baseline::row_kernels<Value>;
}

template struct RowKernels<float>;
template struct RowKernels<half>;
template struct RowKernels<bfloat16>;

}  // namespace kvzap::attention

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
