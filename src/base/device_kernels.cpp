#include "base/device_kernels.hpp"

#include <fmt/format.h>

#include <atomic>
#include <cstdlib>
#include <kvzap/config.hpp>
#include <kvzap/core/types.hpp>
#include <string_view>

#include "base/kokkos_compat.hpp"

namespace kvzap::base {
namespace {

bool device_at_start() {
  const char* asked = std::getenv("KVZAP_KERNELS");
  const std::string_view name = asked ? asked : "";
  if (!name.empty() && name != "device" && name != "host") {
    throw Error(fmt::format("KVZAP_KERNELS is \"{}\"; expected host or device", name));
  }
  if (name == "device" && !KVZAP_HAVE_DEVICE_KERNELS) {
    throw Error(
        "KVZAP_KERNELS is \"device\"; this build has no device kernels: configure it with "
        "KVZAP_DEVICE_KERNELS_ON_HOST=ON");
  }
  return name == "device";
}

std::atomic<bool>& device_forced() {
  static std::atomic<bool> device{device_at_start()};
  return device;
}

}  // namespace

bool uses_device_kernels() {
  return !runs_on_host || device_forced().load(std::memory_order_relaxed);
}

void set_device_kernels(bool device) { device_forced() = device; }

}  // namespace kvzap::base
