// Collective functions of values in device memory by NCCL, which needs no host to wait.
#pragma once

#include <cstdint>
#include <kvzap/core/communicator.hpp>
#include <string>
#include <vector>

#include "base/kokkos_compat.hpp"

namespace kvzap::parallel {

/// The ranks of a Communicator as NCCL knows them, each with a device of its own. Calls enqueue
/// their work on the stream of an instance and return; so kernels launched later on it see the
/// results, and base::LaunchGraph records the calls. Whether a call is recorded must be alike on
/// all ranks. Calls throw Error if NCCL refuses.
class NcclRanks {
 public:
  using Counts = std::vector<std::int64_t>;

  /// Returns whether the environment has no KVZAP_NCCL=off. Throws Error if that variable is
  /// neither on nor off.
  static bool is_wanted();
  /// Returns NCCL's version, and whether the environment turns it off; "none" in builds without.
  static std::string version();

  /// Returns the ranks of `comm`, or null if they use MPI: in builds without NCCL, on one rank,
  /// with KVZAP_NCCL=off, with several ranks on a device, or after an error of NCCL. In the last
  /// two cases rank 0 prints a note once. All ranks get the same answer. The first call for a
  /// communicator and a device is collective, waits and allocates.
  static NcclRanks* of(const Communicator& comm, const ExecutionSpace& exec);
  /// Returns the same, but null before the first call of `of`.
  static NcclRanks* known(const Communicator& comm, const ExecutionSpace& exec);

  virtual ~NcclRanks() = default;

  /// Replaces each of `count` values by its sum over ranks.
  virtual void sum(const ExecutionSpace& exec, float* values, std::int64_t count) = 0;
  /// As Communicator::all_gather.
  virtual void all_gather(const ExecutionSpace& exec, const float* values, const Counts& counts,
                          float* all) = 0;
  /// As Communicator::exchange.
  virtual void exchange(const ExecutionSpace& exec, const float* values, const Counts& sent,
                        float* all, const Counts& received) = 0;
  /// Waits for the instance's work. Throws Error, and lets the work end, if NCCL meanwhile reports
  /// an error, such as a rank that has vanished.
  virtual void wait(const ExecutionSpace& exec) = 0;
};

}  // namespace kvzap::parallel
