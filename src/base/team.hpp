// Teams of the kernels of devices: how many threads and lanes they have, and what they may ask for.
#pragma once

#include <algorithm>
#include <kvzap/core/types.hpp>

#include "base/kokkos_compat.hpp"

namespace kvzap::detail {

/// Threads of a team, and vector lanes of a thread.
struct TeamShape {
  int threads = 1;
  int lanes = 1;
};

/// What teams have: on a device `wanted`, on a host one thread of one lane, and on either what
/// KVZAP_TEAM=threads,lanes in the environment says when first asked (no more threads than there
/// are), so that tests can run teams of several on hosts. Throws Error if the variable is not two
/// positive numbers.
TeamShape team_shape(TeamShape wanted);
/// The same shape for all kernels from now on, for tests; {0, 0}: no longer. Not while kernels run.
void set_team_shape(TeamShape shape);

/// Bytes of a kernel's own that Kokkos still passes as arguments: with its policy they are at most
/// 512. More go through a buffer on the device, before each of whose uses the host waits for the
/// one before.
inline constexpr std::size_t most_arguments = 384;

using TeamPolicy = Kokkos::TeamPolicy<ExecutionSpace>;
using TeamMember = typename TeamPolicy::member_type;

/// A policy of `teams` teams for `kernel` that have up to `wanted` threads: fewer where the backend
/// allows no more, or where bytes(threads) of team scratch is more than is safe to ask for.
template <class Kernel, class Bytes>
TeamPolicy team_policy(const ExecutionSpace& exec, std::int64_t teams, TeamShape wanted,
                       const Kernel& kernel, const Bytes& bytes) {
  const TeamShape shape = team_shape(wanted);
  const auto policy_of = [&](int threads) {
    TeamPolicy policy(exec, static_cast<int>(teams), threads, shape.lanes);
    policy.set_scratch_size(0, Kokkos::PerTeam(static_cast<int>(bytes(threads)) + 16));
    return policy;
  };
  int threads = shape.threads;
  if (threads > 1) {
    const TeamPolicy one = policy_of(1);
    threads = std::min(threads, one.team_size_max(kernel, Kokkos::ParallelForTag()));
    const auto most = static_cast<std::size_t>(TeamPolicy::scratch_size_max(0));
    while (threads > 1 && bytes(threads) + 16 > most) threads /= 2;
  }
  return policy_of(threads);
}

/// Bytes of team scratch of level 0 that are safe to ask for.
inline std::size_t team_scratch_limit() {
  return static_cast<std::size_t>(TeamPolicy::scratch_size_max(0)) - 16;
}

}  // namespace kvzap::detail
