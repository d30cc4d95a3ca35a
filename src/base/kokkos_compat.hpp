// Differences between Kokkos versions (3.4 to 5). Those that public templates need are in
// view_checks.hpp and score.hpp.
#pragma once

#include <Kokkos_Core.hpp>
#include <kvzap/core/view_checks.hpp>
#include <string>
#include <type_traits>
#include <utility>

namespace kvzap::base {

/// Whether kernels run on the host, so that they may call plain host functions.
inline constexpr bool runs_on_host =
    std::is_same_v<Kokkos::DefaultExecutionSpace, Kokkos::DefaultHostExecutionSpace>;

/// Host memory that a device copies at full rate, without waiting for the host.
#if defined(KOKKOS_HAS_SHARED_HOST_PINNED_SPACE)
using StagingSpace = Kokkos::SharedHostPinnedSpace;
#else
using StagingSpace = Kokkos::HostSpace;
#endif

/// What `create_mirror_view` makes of a view. (Kokkos 5 deprecates View::HostMirror;
/// host_mirror_type is another view before Kokkos 4.6.)
template <class View>
using HostMirror = decltype(Kokkos::create_mirror_view(std::declval<const View&>()));

/// Waits for one execution-space instance; the name gives the reason. (Kokkos 3.4's Serial fence
/// takes no label.)
template <class Exec>
void fence(const Exec& exec, [[maybe_unused]] const char* name) {
#if KOKKOS_VERSION >= 30500
  exec.fence(name);
#else
  exec.fence();
#endif
}

template <class Exec>
auto equal_instances(const Exec& a, const Exec& b, int) -> decltype(static_cast<bool>(a == b)) {
  return a == b;
}
template <class Exec>
auto equal_instances(const Exec& a, const Exec& b, long)
    -> decltype(a.cuda_stream() == b.cuda_stream()) {
  return a.cuda_stream() == b.cuda_stream();
}
template <class Exec>
bool equal_instances(const Exec& a, const Exec& b, ...) {
  return a.impl_instance_id() == b.impl_instance_id();
}

/// Returns whether kernels of one instance run after earlier kernels of the other. (Kokkos 3.4
/// cannot compare instances.)
template <class Exec>
bool same_instance(const Exec& a, const Exec& b) {
  return equal_instances(a, b, 0);
}

}  // namespace kvzap::base
