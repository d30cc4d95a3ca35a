// The choice between the host's and the devices' form of a step.
#pragma once

namespace kvzap::base {

/// Returns whether steps run in their form for devices. They always do if the execution space is a
/// device. On a host, which has faster forms, they do if the environment has KVZAP_KERNELS=device
/// at the first call; so tests reach the device code without a device. Throws Error if the variable
/// is not "device", "host" or empty.
bool uses_device_kernels();

/// Selects the form for hosts from now on, for tests. Do not call it while kernels run.
void set_device_kernels(bool device);

}  // namespace kvzap::base
