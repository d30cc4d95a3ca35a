// Values in execution-space memory that ranks sum, gather or exchange.
#pragma once

#include <kvzap/core/communicator.hpp>
#include <numeric>
#include <vector>

#include "base/kokkos_compat.hpp"
#include "base/scratch.hpp"
#include "linalg/gemm.hpp"
#include "parallel/gpu_aware.hpp"
#include "parallel/nccl_ranks.hpp"

namespace kvzap::parallel {

/// Collective functions of a Communicator, of values that kernels read and write. Later work on the
/// instance `exec` sees the results. NCCL enqueues the calls where it is used (NcclRanks::of);
/// otherwise MPI makes them after a fence. Holds host buffers for MPI libraries that cannot read
/// device memory, and keeps them between calls.
class RankExchange {
 public:
  using Counts = std::vector<std::int64_t>;

  /// Throws the error of NcclRanks::is_wanted.
  RankExchange();

  /// Makes NCCL's communicator if it is to be used and does not exist. Otherwise the first of the
  /// calls below makes it. Collective.
  static void prepare(const ExecutionSpace& exec, const Communicator& comm) {
    NcclRanks::of(comm, exec);
  }
  /// Returns whether the calls below only enqueue work. False before `prepare`.
  static bool enqueues(const ExecutionSpace& exec, const Communicator& comm) {
    return NcclRanks::known(comm, exec) != nullptr;
  }
  /// Waits for the instance if NCCL has calls on it, to throw NCCL's errors (NcclRanks::wait).
  static void wait(const ExecutionSpace& exec, const Communicator& comm) {
    if (NcclRanks* const ranks = NcclRanks::known(comm, exec)) ranks->wait(exec);
  }

  /// Replaces each of `values` (contiguous) by its sum over ranks.
  void sum(const ExecutionSpace& exec, const Communicator& comm, const linalg::Matrix& values) {
    if (comm.size() == 1) return;
    const auto count = static_cast<std::int64_t>(values.size());
    if (NcclRanks* const ranks = NcclRanks::of(comm, exec)) {
      return ranks->sum(exec, values.data(), count);
    }
    float* const data = reads_kernel_memory() ? values.data() : room(m_sent, count);
    give(exec, values.data(), count, data);
    comm.all_reduce_sum(data, count);
    take(exec, data, count, values.data());
  }
  void all_gather(const ExecutionSpace& exec, const Communicator& comm, const float* values,
                  const Counts& counts, float* all) {
    if (NcclRanks* const ranks = NcclRanks::of(comm, exec)) {
      return ranks->all_gather(exec, values, counts, all);
    }
    call(exec, values, counts[comm.rank()], all, sum_of(counts),
         [&](const float* from, float* to) { comm.all_gather(from, counts, to); });
  }
  void exchange(const ExecutionSpace& exec, const Communicator& comm, const float* values,
                const Counts& sent, float* all, const Counts& received) {
    if (NcclRanks* const ranks = NcclRanks::of(comm, exec)) {
      return ranks->exchange(exec, values, sent, all, received);
    }
    call(exec, values, sum_of(sent), all, sum_of(received),
         [&](const float* from, float* to) { comm.exchange(from, sent, to, received); });
  }

  /// Allocates the host buffers for calls in which this rank gives up to `sent` floats and gets up
  /// to `received` (for a sum: 0), so that these allocate nothing.
  void reserve(const Communicator& comm, std::int64_t sent, std::int64_t received) {
    if (comm.size() == 1 || reads_kernel_memory() || enqueues(ExecutionSpace(), comm)) return;
    room(m_sent, sent);
    room(m_received, received);
  }

 private:
  using Buffer = Kokkos::View<float*, base::StagingSpace>;
  using Unmanaged = Kokkos::MemoryTraits<Kokkos::Unmanaged>;

  // Whether MPI can read the memory of kernels.
  static bool reads_kernel_memory() {
    constexpr bool on_host = Kokkos::SpaceAccessibility<Kokkos::HostSpace, MemorySpace>::accessible;
    static const bool reads = on_host || mpi_is_gpu_aware();
    return reads;
  }
  static std::int64_t sum_of(const Counts& counts) {
    return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  }
  static float* room(Buffer& buffer, std::int64_t count) {
    base::reserve_scratch(buffer, count, "kvzap::rank_exchange");
    return buffer.data();
  }

  template <class Call>
  void call(const ExecutionSpace& exec, const float* values, std::int64_t n, float* all,
            std::int64_t n_all, const Call& call) {
    if (reads_kernel_memory()) {
      base::fence(exec, "kvzap::rank_exchange: MPI reads what the instance wrote");
      return call(values, all);
    }
    float* const from = room(m_sent, n);
    float* const to = room(m_received, n_all);
    give(exec, values, n, from);
    call(from, to);
    take(exec, to, n_all, all);
  }

  // Makes values of kernels readable by MPI at `data`, which is `values` or a buffer.
  static void give(const ExecutionSpace& exec, const float* values, std::int64_t n, float* data) {
    if (data != values) {
      Kokkos::deep_copy(exec, Kokkos::View<float*, base::StagingSpace, Unmanaged>(data, n),
                        Kokkos::View<const float*, MemorySpace, Unmanaged>(values, n));
    }
    base::fence(exec, "kvzap::rank_exchange: MPI reads what the instance wrote");
  }
  static void take(const ExecutionSpace& exec, const float* data, std::int64_t n, float* values) {
    if (data == values) return;
    Kokkos::deep_copy(exec, Kokkos::View<float*, MemorySpace, Unmanaged>(values, n),
                      Kokkos::View<const float*, base::StagingSpace, Unmanaged>(data, n));
  }

  Buffer m_sent, m_received;
};

}  // namespace kvzap::parallel
