// Whether MPI accepts addresses of GPU memory.
#pragma once

#include <optional>
#include <string_view>

namespace kvzap::parallel {

/// Answers of an MPI library for each kind of GPU; nothing if it has no query. `variable`: for a
/// library without a query, whether the environment enables GPU support for this build's backend.
struct GpuAnswers {
  std::optional<bool> cuda, rocm, level_zero;
  bool variable = false;
};

/// Returns whether MPI accepts addresses of memory of a Kokkos backend ("Cuda", "HIP", "SYCL",
/// "OpenMP", …). Each backend has its own answer: a library that reads CUDA memory would take a HIP
/// or SYCL address for a host address. Without an answer, and for unknown backends, data passes
/// through host memory. This also covers backends that have only host memory.
bool takes_device_memory(std::string_view backend, const GpuAnswers& answers);

/// Queries this process's MPI library. Some libraries answer only after MPI has started.
GpuAnswers ask_mpi();

/// Returns the answer for the backend of this build.
bool mpi_is_gpu_aware();

}  // namespace kvzap::parallel
