// Launches of attend_parts.
#pragma once

#include "attention/call.hpp"
#include "attention/cuda/split_kernel.hpp"
#include "base/cuda/launch.hpp"

namespace kvzap::attention::cuda {

/// Launches attend_parts for the parts of a kind.
template <class Tiles>
void launch_split(const ExecutionSpace& exec, std::atomic<bool>& is_prepared,
                  const SplitSpans& spans, std::int64_t parts, const Tiles& tiles,
                  const AttentionCall& call) {
  if (parts == 0) return;
  const int passes = (spans.group + heads_at_once - 1) / heads_at_once;
  const SplitQueries queries{call.queries.data(), strides_of(call.queries), call.soft_cap, passes};
  base::cuda::launch(exec, is_prepared, attend_parts<Tiles>,
                     {parts * passes, 1, 32 * warps, SplitMemory<Tiles>::bytes}, spans, tiles,
                     queries);
}

}  // namespace kvzap::attention::cuda
