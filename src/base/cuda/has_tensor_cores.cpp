// Alone in a file: tests of emulated kernels replace it.
#include "base/cuda/has_tensor_cores.hpp"

#include <Kokkos_Core.hpp>

namespace kvzap::base::cuda {

bool has_tensor_cores() {
#if defined(KOKKOS_ENABLE_CUDA)
  static const bool has = [] {
    int device = 0, major = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) ==
               cudaSuccess &&
           major >= 8;
  }();
  return has;
#else
  return false;
#endif
}

}  // namespace kvzap::base::cuda
