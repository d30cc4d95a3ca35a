// NCCL, and what its callers ask of CUDA. nccl_emulated.hpp has the same names for hosts, so that
// tests run the callers without a device.
#pragma once

#include <nccl.h>

#include <string>

#include "base/kokkos_compat.hpp"

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 13, 4)
#error "kvzap needs NCCL 2.13.4 or newer (ncclGetLastError)"
#endif

namespace kvzap::parallel::nccl {

inline int device_of(const ExecutionSpace& exec) { return exec.cuda_device(); }
inline cudaStream_t stream_of(const ExecutionSpace& exec) { return exec.cuda_stream(); }

/// Makes a device that of the calling thread.
inline void select(int device) { cudaSetDevice(device); }

/// Returns the place of a device in its machine, by which NCCL tells devices apart; "" if unknown.
inline std::string place_of(int device) {
  char place[32] = "";
  return cudaDeviceGetPCIBusId(place, sizeof(place), device) == cudaSuccess ? place : "";
}

/// Returns whether the instance has work that is not done.
inline bool is_busy(const ExecutionSpace& exec) {
  const bool is_busy = cudaStreamQuery(exec.cuda_stream()) == cudaErrorNotReady;
  if (is_busy) cudaGetLastError();  // forgets that answer
  return is_busy;
}

}  // namespace kvzap::parallel::nccl
