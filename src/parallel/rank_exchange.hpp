// Values in execution-space memory that ranks gather from each other or exchange.
#pragma once

#include <kvzap/core/communicator.hpp>
#include <numeric>
#include <vector>

#include "base/kokkos_compat.hpp"
#include "base/scratch.hpp"
#include "linalg/gemm.hpp"
#include "parallel/all_reduce.hpp"

namespace kvzap::parallel {

/// Communicator::all_gather and Communicator::exchange, of values that kernels read and write.
/// Holds the host buffers for MPI libraries that cannot read device memory.
class RankExchange {
 public:
  using Counts = std::vector<std::int64_t>;

  /// Later work on `exec` sees `all`. Collective.
  void all_gather(const ExecutionSpace& exec, const Communicator& comm, const float* values,
                  const Counts& counts, float* all) {
    through_host(exec, values, counts[comm.rank()], all, sum_of(counts),
                 [&](const float* from, float* to) { comm.all_gather(from, counts, to); });
  }
  void exchange(const ExecutionSpace& exec, const Communicator& comm, const float* values,
                const Counts& sent, float* all, const Counts& received) {
    through_host(exec, values, sum_of(sent), all, sum_of(received),
                 [&](const float* from, float* to) { comm.exchange(from, sent, to, received); });
  }

  /// Allocates the host buffers for calls in which this rank gives up to `sent` floats and gets up
  /// to `received`, so that these allocate nothing.
  void reserve(std::int64_t sent, std::int64_t received) {
    if (reads_kernel_memory()) return;
    base::reserve_scratch(m_sent, sent, "kvzap::exchange::sent");
    base::reserve_scratch(m_received, received, "kvzap::exchange::received");
  }

 private:
  using Host = Kokkos::View<float*, base::StagingSpace>;

  static std::int64_t sum_of(const Counts& counts) {
    return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  }

  template <class Call>
  void through_host(const ExecutionSpace& exec, const float* values, std::int64_t n, float* all,
                    std::int64_t n_all, const Call& call) {
    base::fence(exec, "kvzap::exchange: MPI reads what the instance wrote");
    if (reads_kernel_memory()) return call(values, all);
    using Unmanaged = Kokkos::MemoryTraits<Kokkos::Unmanaged>;
    reserve(n, n_all);
    Kokkos::deep_copy(exec, Kokkos::View<float*, base::StagingSpace, Unmanaged>(m_sent.data(), n),
                      Kokkos::View<const float*, MemorySpace, Unmanaged>(values, n));
    base::fence(exec, "kvzap::exchange: MPI reads the copy on the host");
    call(m_sent.data(), m_received.data());
    Kokkos::deep_copy(
        exec, Kokkos::View<float*, MemorySpace, Unmanaged>(all, n_all),
        Kokkos::View<const float*, base::StagingSpace, Unmanaged>(m_received.data(), n_all));
  }

  Host m_sent, m_received;
};

}  // namespace kvzap::parallel
