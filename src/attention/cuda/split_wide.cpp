#include "attention/cuda/launch.hpp"
#include "attention/cuda/split_kernel.hpp"
#include "attention/cuda/tensor_cores.hpp"

namespace kvzap::attention::tensor_cores {

bool attend_wide_parts(const ExecutionSpace& exec, const SplitSpans& spans,
                       const CachedLayer& cached, const AttentionCall& call) {
  if (attend_latent_parts(exec, spans, cached, call)) return true;
  return with_wide_heads(call.dtype(), call.dim, [&](auto zero, auto dim) {
    using Value = decltype(zero);
    const cuda::WideTiles<Value, decltype(dim)::value> tiles{wide_rows_of<Value>(cached, call)};
    return cuda::launch_split(exec, spans, spans.wide_parts, tiles, call);
  });
}

}  // namespace kvzap::attention::tensor_cores
