// Which form of a step runs where a host has one of its own.
#pragma once

namespace kvzap::detail {

/// Whether steps run in the form that they have on devices: always where the execution space is a
/// device; on a host, where faster forms exist, if KVZAP_KERNELS=device is in the environment when
/// first asked, so that tests reach the code of devices without one. Throws Error if the variable
/// is anything but "device", "host" or empty.
bool uses_device_kernels();

/// Uses the one or the other form on hosts from now on, for tests; not while kernels run.
void set_device_kernels(bool device);

/// Threads of a team, and vector lanes of each.
struct TeamShape {
  int threads;
  int lanes;
};

/// The shape that a kernel's teams have: the given one, unless KVZAP_TEAM=threads,lanes is in the
/// environment when first asked, or a test has set another. On Kokkos' Serial backend, whose teams
/// have one thread, always the given one. Throws Error if the variable is not two positive numbers.
TeamShape team_shape(int default_threads, int default_lanes);

/// Uses another shape from now on, for tests, or none with 0 threads; not while kernels run.
void set_team_shape(TeamShape shape);

}  // namespace kvzap::detail
