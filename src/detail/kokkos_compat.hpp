// The one place where differences between Kokkos versions (3.4 to 5) live.
#pragma once

#include <Kokkos_Core.hpp>
#include <string>

namespace kvzap::detail {

#if KOKKOS_VERSION >= 30700
namespace math = Kokkos;
#else
namespace math = Kokkos::Experimental;
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
