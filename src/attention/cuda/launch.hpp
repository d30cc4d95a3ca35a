// Launches of attend_parts.
#pragma once

#include "attention/call.hpp"
#include "attention/cuda/split_kernel.hpp"
#include "base/cuda/has_tensor_cores.hpp"
#include "base/cuda/launch.hpp"

namespace kvzap::attention::cuda {

/// Launches attend_parts for the parts of a kind. Returns false if the device has too little shared
/// memory.
template <class Tiles>
bool launch_split(const ExecutionSpace& exec, const SplitSpans& spans, std::int64_t parts,
                  const Tiles& tiles, const AttentionCall& call) {
  constexpr int bytes = SplitMemory<Tiles>::bytes;
  if (bytes > most_block_memory()) return false;
  if (parts == 0) return true;
  static std::atomic<bool> is_prepared{false};
  const int passes = (spans.group + heads_at_once - 1) / heads_at_once;
  const SplitQueries queries{call.queries.data(), strides_of(call.queries), call.soft_cap, passes};
  base::cuda::launch(exec, is_prepared, attend_parts<Tiles>, {parts * passes, 1, 32 * warps, bytes},
                     spans, tiles, queries);
  return true;
}

}  // namespace kvzap::attention::cuda
