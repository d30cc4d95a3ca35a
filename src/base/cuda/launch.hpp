// Launches of kernels written for tensor cores: on the stream of an execution space, or emulated.
#pragma once

#include <fmt/format.h>

#include <atomic>
#include <kvzap/core/types.hpp>

#include "base/cuda/tiles.hpp"
#include "base/launch.hpp"

namespace kvzap::base::cuda {

/// Blocks of a launch, threads of a block and its bytes of shared memory.
struct LaunchShape {
  std::int64_t blocks_x;
  int blocks_y, threads, bytes;
};

/// Launches a kernel. is_prepared, one for each kernel, remembers that it may use so much shared
/// memory. Throws Error if the device refuses.
template <class Kernel, class... Arguments>
void launch(const ExecutionSpace& exec, std::atomic<bool>& is_prepared, Kernel* kernel,
            const LaunchShape& shape, const Arguments&... arguments) {
#if defined(__CUDACC__)
  // Kokkos does the same before its launches: each thread of the host has a device of its own.
  cudaError_t status = cudaSetDevice(exec.cuda_device());
  if (status == cudaSuccess && !is_prepared.load(std::memory_order_relaxed)) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.bytes);
    is_prepared.store(status == cudaSuccess, std::memory_order_relaxed);
  }
  if (status == cudaSuccess) {
    const dim3 blocks(static_cast<unsigned>(shape.blocks_x), static_cast<unsigned>(shape.blocks_y));
    void* passed[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
    status = cudaLaunchKernel(kernel, blocks, dim3(shape.threads), passed, shape.bytes,
                              exec.cuda_stream());
  }
  if (status != cudaSuccess) {
    throw Error(fmt::format("CUDA: a kernel cannot be launched: {}", cudaGetErrorString(status)));
  }
#else
  is_prepared = true;
  base::launch([=] {
    exec.fence();
    emulated::launch({static_cast<int>(shape.blocks_x), shape.blocks_y, shape.threads, shape.bytes},
                     [&] { kernel(arguments...); });
  });
#endif
}

}  // namespace kvzap::base::cuda
