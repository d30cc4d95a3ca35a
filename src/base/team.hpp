// Teams of device kernels: their numbers of threads and lanes, and their limits.
#pragma once

#include <algorithm>
#include <kvzap/core/types.hpp>

#include "base/kokkos_compat.hpp"

namespace kvzap::base {

/// Threads of a team, and vector lanes of a thread.
struct TeamShape {
  int threads = 1;
  int lanes = 1;
};

/// Returns the shape of teams: `wanted` on a device, one thread of one lane on a host. The
/// environment variable KVZAP_TEAM=threads,lanes, read at the first call, overrides both (up to the
/// number of threads that exist), so that tests can run larger teams on hosts. Throws Error if the
/// variable is not two positive numbers.
TeamShape team_shape(TeamShape wanted);
/// Sets the shape for all kernels from now on, for tests; {0, 0} resets it. Do not call it while
/// kernels run.
void set_team_shape(TeamShape shape);

/// Largest size of a kernel's own data, in bytes, that Kokkos still passes as arguments; with its
/// policy that is at most 512 bytes. Larger kernels use a buffer on the device; before each use the
/// host waits for the previous one.
inline constexpr std::size_t most_arguments = 384;

// By this hint Kokkos passes larger kernels as arguments, too: with HIP its own data takes more.
using PassedAsArguments = Kokkos::Experimental::WorkItemProperty::HintLightWeight_t;
using TeamPolicy = Kokkos::TeamPolicy<ExecutionSpace, PassedAsArguments>;
/// The same for kernels with many registers, whose teams have up to 128 lanes in all. Otherwise the
/// compiler for AMD's GPUs leaves registers for 1,024, and 38 kernels of gfx90a spill up to 803 of
/// them; with the bound 6 do, up to 18. (nvcc needs no bound, and with it gives split_kv 158
/// registers for bf16 on sm_90 in place of 104.)
#if defined(KOKKOS_ENABLE_HIP)
using SmallTeamPolicy =
    Kokkos::TeamPolicy<ExecutionSpace, PassedAsArguments, Kokkos::LaunchBounds<128, 1>>;
#else
using SmallTeamPolicy = TeamPolicy;
#endif
using TeamMember = typename TeamPolicy::member_type;

/// Returns a policy of `teams` teams for `kernel` with up to `wanted` threads. They have fewer if
/// the backend allows no more, or if bytes(threads) of team scratch exceeds the safe limit.
template <class Policy = TeamPolicy, class Kernel, class Bytes>
Policy team_policy(const ExecutionSpace& exec, std::int64_t teams, TeamShape wanted,
                   const Kernel& kernel, const Bytes& bytes) {
  const TeamShape shape = team_shape(wanted);
  const auto policy_of = [&](int threads) {
    Policy policy(exec, static_cast<int>(teams), threads, shape.lanes);
    policy.set_scratch_size(0, Kokkos::PerTeam(static_cast<int>(bytes(threads)) + 16));
    return policy;
  };
  int threads = shape.threads;
  if (threads > 1) {
    // Asks the backend for the kernel's limits only if its needs have changed.
    struct Answer {
      TeamShape shape;
      std::size_t one, all;  // bytes of scratch
      int threads;
    };
    thread_local Answer last{};
    const std::size_t one = bytes(1), all = bytes(threads);
    if (last.shape.threads != shape.threads || last.shape.lanes != shape.lanes || last.one != one ||
        last.all != all) {
      int allowed = std::min(threads, policy_of(1).team_size_max(kernel, Kokkos::ParallelForTag()));
      const auto most = static_cast<std::size_t>(Policy::scratch_size_max(0));
      while (allowed > 1 && bytes(allowed) + 16 > most) allowed /= 2;
      last = {shape, one, all, allowed};
    }
    threads = last.threads;
  }
  return policy_of(threads);
}

/// Lets lanes of a thread read what its other lanes have written. Kokkos does so after loops over
/// lanes on CUDA and SYCL, but not with HIP, whose lanes run in step: there the compiler must keep
/// the order.
KOKKOS_FORCEINLINE_FUNCTION void fence_lanes() {
#if defined(__HIP_DEVICE_COMPILE__)
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
#endif
}

/// Returns the bytes of team scratch of level 0 that are safe to request.
inline std::size_t team_scratch_limit() {
  return static_cast<std::size_t>(TeamPolicy::scratch_size_max(0)) - 16;
}

}  // namespace kvzap::base
