// Sums over ranks of values in execution-space memory.
#pragma once

#include <kvzap/core/communicator.hpp>

#include "base/kokkos_compat.hpp"
#include "base/scratch.hpp"
#include "linalg/gemm.hpp"
#include "parallel/gpu_aware.hpp"

namespace kvzap::parallel {

/// Returns whether MPI can read the memory of kernels.
inline bool reads_kernel_memory() {
  constexpr bool on_host = Kokkos::SpaceAccessibility<Kokkos::HostSpace, MemorySpace>::accessible;
  static const bool reads = on_host || mpi_is_gpu_aware();
  return reads;
}

/// Sums over ranks. Holds the host buffer for MPI libraries that cannot read device memory. The
/// buffer is kept between calls.
class RankSum {
 public:
  /// Replaces each of `values` (contiguous) by its sum over ranks. Collective. Later work on `exec`
  /// sees the sums.
  void operator()(const ExecutionSpace& exec, const Communicator& comm,
                  const linalg::Matrix& values) {
    if (comm.size() == 1) return;
    const std::int64_t count = values.size();
    if (reads_kernel_memory()) {
      base::fence(exec, "kvzap::all_reduce: MPI reads what the instance wrote");
      return comm.all_reduce_sum(values.data(), count);
    }
    using Unmanaged = Kokkos::MemoryTraits<Kokkos::Unmanaged>;
    base::reserve_scratch(m_staging, count, "kvzap::all_reduce::staging");
    const Kokkos::View<float*, base::StagingSpace, Unmanaged> host(m_staging.data(), count);
    const Kokkos::View<float*, MemorySpace, Unmanaged> device(values.data(), count);
    Kokkos::deep_copy(exec, host, device);
    base::fence(exec, "kvzap::all_reduce: MPI reads the copy on the host");
    comm.all_reduce_sum(host.data(), count);
    Kokkos::deep_copy(exec, device, host);
  }

  /// Allocates the host buffer for sums of up to `count` values, so that these allocate nothing.
  void reserve(const Communicator& comm, std::int64_t count) {
    if (comm.size() > 1 && !reads_kernel_memory()) {
      base::reserve_scratch(m_staging, count, "kvzap::all_reduce::staging");
    }
  }

 private:
  Kokkos::View<float*, base::StagingSpace> m_staging;
};

}  // namespace kvzap::parallel
