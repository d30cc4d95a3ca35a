// Launches of attend_parts.
#pragma once

#include "attention/call.hpp"
#include "attention/cuda/split_kernel.hpp"
#include "base/cuda/has_tensor_cores.hpp"
#include "base/cuda/launch.hpp"

namespace kvzap::attention::cuda {

/// Launches attend_parts for the parts of a kind, with `stages` tiles of a warp in shared memory or
/// with fewer. Returns false if the device has too little for two.
template <class Tiles, int stages = 3>
bool launch_split(const ExecutionSpace& exec, const SplitSpans& spans, std::int64_t parts,
                  const Tiles& tiles, const AttentionCall& call) {
  using Memory = SplitMemory<Tiles, stages>;
  if (parts == 0) return true;
  if (Memory::bytes > most_block_memory()) {
    if constexpr (stages > 2) {
      return launch_split<Tiles, stages - 1>(exec, spans, parts, tiles, call);
    }
    return false;
  }
  static std::atomic<bool> is_prepared{false};
  const int passes = (spans.group + heads_at_once - 1) / heads_at_once;
  const SplitQueries queries{call.queries.data(), strides_of(call.queries), call.soft_cap, passes};
  base::cuda::launch(exec, is_prepared, attend_parts<Tiles, stages>,
                     {parts * passes, 1, 32 * warps, Memory::bytes}, spans, tiles, queries);
  return true;
}

}  // namespace kvzap::attention::cuda
