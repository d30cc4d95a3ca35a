#include "attention/cuda/launch.hpp"
#include "attention/cuda/split_kernel.hpp"
#include "attention/cuda/tensor_cores.hpp"

namespace kvzap::attention::tensor_cores {
namespace {

template <class Value, int D>
bool launch_parts(const ExecutionSpace& exec, const SplitSpans& spans, const CachedLayer& cached,
                  const AttentionCall& call) {
  using Tiles = cuda::WideTiles<Value, D>;
  const Tiles tiles{{cached.addresses.data(), call.new_keys.values<Value>(),
                     call.new_values.values<Value>(), strides_of(call.new_keys), cached.window,
                     cached.page_rows, cached.format.vectors()}};
  return cuda::launch_split(exec, spans, spans.wide_parts, tiles, call);
}

template <class Value>
bool attend_typed(const ExecutionSpace& exec, const SplitSpans& spans, const CachedLayer& cached,
                  const AttentionCall& call) {
  switch (call.dim) {
    case 64:
      return launch_parts<Value, 64>(exec, spans, cached, call);
    case 80:
      return launch_parts<Value, 80>(exec, spans, cached, call);
    case 96:
      return launch_parts<Value, 96>(exec, spans, cached, call);
    case 128:
      return launch_parts<Value, 128>(exec, spans, cached, call);
    case 256:
      return launch_parts<Value, 256>(exec, spans, cached, call);
    default:
      return false;
  }
}

}  // namespace

bool attend_wide_parts(const ExecutionSpace& exec, const SplitSpans& spans,
                       const CachedLayer& cached, const AttentionCall& call) {
  switch (call.dtype()) {
    case DType::f16:
      return attend_typed<half>(exec, spans, cached, call);
    case DType::bf16:
      return attend_typed<bfloat16>(exec, spans, cached, call);
    case DType::f32:
      break;
  }
  return false;
}

}  // namespace kvzap::attention::tensor_cores
