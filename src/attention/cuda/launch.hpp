// Launches of the kernels of this folder: on the stream of an execution space, or emulated.
#pragma once

#include <fmt/format.h>

#include <atomic>
#include <kvzap/core/types.hpp>

#include "attention/call.hpp"
#include "attention/cuda/split_kernel.hpp"

namespace kvzap::attention::cuda {

/// Launches blocks_x * blocks_y blocks with `bytes` of shared memory each. is_prepared, one for each
/// kernel, remembers that it may use so much.
template <class Kernel, class... Arguments>
void launch(const ExecutionSpace& exec, std::atomic<bool>& is_prepared, Kernel* kernel,
            std::int64_t blocks_x, int blocks_y, int threads, int bytes,
            const Arguments&... arguments) {
#if defined(__CUDACC__)
  cudaError_t status = cudaSuccess;
  if (!is_prepared.load(std::memory_order_relaxed)) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    is_prepared.store(status == cudaSuccess, std::memory_order_relaxed);
  }
  if (status == cudaSuccess) {
    const dim3 blocks(static_cast<unsigned>(blocks_x), static_cast<unsigned>(blocks_y));
    kernel<<<blocks, threads, bytes, exec.cuda_stream()>>>(arguments...);
    status = cudaGetLastError();
  }
  if (status != cudaSuccess) {
    throw Error(fmt::format("CUDA: attention cannot be launched: {}", cudaGetErrorString(status)));
  }
#else
  is_prepared = true;
  exec.fence();
  emulated::launch(static_cast<int>(blocks_x), blocks_y, threads, bytes, 1,
                   [&] { kernel(arguments...); });
#endif
}

/// Launches attend_parts for the parts of a kind.
template <class Tiles>
void launch_split(const ExecutionSpace& exec, std::atomic<bool>& is_prepared,
                  const SplitSpans& spans, std::int64_t parts, const Tiles& tiles,
                  const AttentionCall& call) {
  if (parts == 0) return;
  const int passes = (spans.group + heads_at_once - 1) / heads_at_once;
  const SplitQueries queries{call.queries.data(), strides_of(call.queries), call.soft_cap, passes};
  launch(exec, is_prepared, attend_parts<Tiles>, parts * passes, 1, 32 * warps,
         SplitMemory<Tiles>::bytes, spans, tiles, queries);
}

}  // namespace kvzap::attention::cuda
