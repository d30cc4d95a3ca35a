#include "attention/cuda/latent_kernel.hpp"
#include "attention/cuda/tensor_cores.hpp"
#include "base/cuda/has_tensor_cores.hpp"
#include "base/cuda/launch.hpp"

namespace kvzap::attention::tensor_cores {
namespace {

template <class Tiles>
bool launch_latents(const ExecutionSpace& exec, const SplitSpans& spans, const Tiles& tiles,
                    const AttentionCall& call) {
  if (Tiles::bytes > base::cuda::most_block_memory()) return false;
  if (spans.wide_parts == 0) return true;
  static std::atomic<bool> is_prepared{false};
  const int passes = (spans.group + Tiles::heads - 1) / Tiles::heads;
  const cuda::SplitQueries queries{call.queries.data(), strides_of(call.queries), call.soft_cap,
                                   passes};
  base::cuda::launch(exec, is_prepared, cuda::attend_latents<Tiles>,
                     {std::int64_t{spans.wide_parts} * passes, 1, Tiles::threads, Tiles::bytes},
                     spans, tiles, queries);
  return true;
}

}  // namespace

bool attend_latent_parts(const ExecutionSpace& exec, const SplitSpans& spans,
                         const CachedLayer& cached, const AttentionCall& call) {
  if (!cached.format.values_are_keys) return false;
  return with_value_type(call.dtype(), [&](auto zero) {
    using Value = decltype(zero);
    if constexpr (std::is_same_v<Value, float>) {
      return false;
    } else {
      const WideRows<Value> rows = wide_rows_of<Value>(cached, call);
      if (rows.new_keys != rows.new_values) return false;
      return with_head_dim<288, 320, 576>(call.dim, [&](auto dim) {
        constexpr int D = decltype(dim)::value;
        if (call.group <= 16) {
          return launch_latents(exec, spans, cuda::LatentTiles<Value, D, 1>{rows}, call);
        }
        return launch_latents(exec, spans, cuda::LatentTiles<Value, D, 2>{rows}, call);
      });
    }
  });
}

}  // namespace kvzap::attention::tensor_cores
