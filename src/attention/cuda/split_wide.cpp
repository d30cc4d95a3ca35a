#include "attention/cuda/launch.hpp"
#include "attention/cuda/split_kernel.hpp"
#include "attention/cuda/tensor_cores.hpp"

namespace kvzap::attention::tensor_cores {
namespace {

template <class Value, int D>
void launch_parts(const ExecutionSpace& exec, const SplitSpans& spans, const CachedLayer& cached,
                  const AttentionCall& call) {
  using Tiles = cuda::WideTiles<Value, D>;
  static std::atomic<bool> is_prepared{false};
  const Tiles tiles{{cached.addresses.data(), call.new_keys.values<Value>(),
                     call.new_values.values<Value>(), strides_of(call.new_keys), cached.window,
                     cached.page_rows, cached.format.vectors()}};
  cuda::launch_split(exec, is_prepared, spans, spans.wide_parts, tiles, call);
}

template <class Value>
bool attend_typed(const ExecutionSpace& exec, const SplitSpans& spans, const CachedLayer& cached,
                  const AttentionCall& call) {
  switch (call.dim) {
    case 64:
      launch_parts<Value, 64>(exec, spans, cached, call);
      return true;
    case 80:
      launch_parts<Value, 80>(exec, spans, cached, call);
      return true;
    case 96:
      launch_parts<Value, 96>(exec, spans, cached, call);
      return true;
    case 128:
      launch_parts<Value, 128>(exec, spans, cached, call);
      return true;
    case 256:
      launch_parts<Value, 256>(exec, spans, cached, call);
      return true;
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
