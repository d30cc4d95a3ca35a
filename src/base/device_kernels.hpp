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

}  // namespace kvzap::detail
