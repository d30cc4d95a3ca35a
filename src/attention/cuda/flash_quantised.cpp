#include "attention/cuda/flash_launch.hpp"
#include "attention/cuda/tensor_cores.hpp"

namespace kvzap::attention::tensor_cores {

bool attend_quantised_span(const ExecutionSpace& exec, const AttentionSpan& span,
                           const AttentionCall& call, linalg::Vector& scratch) {
  for (const RowType type : {span.cached.format.keys, span.cached.format.values}) {
    if (type != RowType::q8 && type != RowType::q4) return false;
  }
  return with_value_type(call.dtype(), [&](auto zero) {
    using Value = decltype(zero);
    if constexpr (std::is_same_v<Value, float>) {
      return false;
    } else {
      return with_head_dim<64, 96, 128, 256>(call.dim, [&](auto dim) {
        return cuda::launch_tiles<Value, decltype(dim)::value, true>(exec, span, call, scratch);
      });
    }
  });
}

}  // namespace kvzap::attention::tensor_cores
