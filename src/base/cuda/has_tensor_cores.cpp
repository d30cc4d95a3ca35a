// Alone in a file: tests of emulated kernels replace it.
#include "base/cuda/has_tensor_cores.hpp"

#include <Kokkos_Core.hpp>

namespace kvzap::base::cuda {

int most_block_memory() {
#if defined(KOKKOS_ENABLE_CUDA)
  static const int most = [] {
    const int device = Kokkos::Cuda().cuda_device();
    int major = 0, bytes = 0;
    const bool is_known =
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
        cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) ==
            cudaSuccess;
    return is_known && major >= 8 ? bytes : 0;
  }();
  return most;
#else
  return 0;
#endif
}

int multiprocessors() {
#if defined(KOKKOS_ENABLE_CUDA)
  static const int count = [] {
    int found = 1;
    (void)cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount,
                                 Kokkos::Cuda().cuda_device());
    return found;
  }();
  return count;
#else
  return 1;
#endif
}

}  // namespace kvzap::base::cuda
