// Whether MPI takes addresses of a GPU's memory.
#pragma once

#include <optional>
#include <string_view>

namespace kvzap::detail {

/// What an MPI library says of each kind of GPU; nothing where it cannot be asked. `variable` is
/// whether the environment switches GPU support on in a library whose only sign that is, for the
/// backend that this build has.
struct GpuAnswers {
  std::optional<bool> cuda, rocm, level_zero;
  bool variable = false;
};

/// Whether addresses of the memory of a Kokkos backend ("Cuda", "HIP", "SYCL", "OpenMP", …) may be
/// handed to MPI. Each backend has an answer of its own: a library that reads CUDA's memory would
/// take a HIP or SYCL address for one of the host's. Where there is no answer, and for backends
/// that are not known here, data goes through host memory; so it does for those that have no other.
bool takes_device_memory(std::string_view backend, const GpuAnswers& answers);

/// What this process' MPI says. Some libraries know it only after MPI has been started.
GpuAnswers ask_mpi();

/// The same for the backend of this build.
bool mpi_is_gpu_aware();

}  // namespace kvzap::detail
