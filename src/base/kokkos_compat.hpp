// The one place where differences between Kokkos versions (3.4 to 5) live.
#pragma once

#include <Kokkos_Core.hpp>
#include <string>
#include <type_traits>

namespace kvzap::detail {

#if KOKKOS_VERSION >= 30700
namespace math = Kokkos;
#else
namespace math = Kokkos::Experimental;
#endif

/// Whether kernels run on the host, so that they may call plain host functions.
inline constexpr bool runs_on_host =
    std::is_same_v<Kokkos::DefaultExecutionSpace, Kokkos::DefaultHostExecutionSpace>;

/// Host memory that a device copies from and to at its full rate, without waiting for the host.
#if defined(KOKKOS_HAS_SHARED_HOST_PINNED_SPACE)
using StagingSpace = Kokkos::SharedHostPinnedSpace;
#else
using StagingSpace = Kokkos::HostSpace;
#endif

/// Waits for one execution-space instance; the name says why. (Kokkos 3.4's Serial fence takes no
/// label.)
template <class Exec>
void fence(const Exec& exec, [[maybe_unused]] const char* name) {
#if KOKKOS_VERSION >= 30500
  exec.fence(name);
#else
  exec.fence();
#endif
}

}  // namespace kvzap::detail
