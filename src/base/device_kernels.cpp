#include "base/device_kernels.hpp"

#include <fmt/format.h>

#include <atomic>
#include <cstdlib>
#include <kvzap/types.hpp>
#include <string_view>
#include <type_traits>

#include "base/kokkos_compat.hpp"

namespace kvzap::detail {
namespace {

bool initial() {
  const char* asked = std::getenv("KVZAP_KERNELS");
  const std::string_view name = asked ? asked : "";
  if (!name.empty() && name != "device" && name != "host") {
    throw Error(fmt::format("KVZAP_KERNELS is \"{}\"; expected host or device", name));
  }
  return name == "device";
}

TeamShape initial_shape() {
  const char* asked = std::getenv("KVZAP_TEAM");
  TeamShape shape{0, 0};
  if (asked == nullptr || *asked == 0) return shape;
  char* end = nullptr;
  const long threads = std::strtol(asked, &end, 10);
  const long lanes = *end == ',' ? std::strtol(end + 1, &end, 10) : 0;
  if (*end != 0 || threads < 1 || threads > 1024 || lanes < 1 || lanes > 1024) {
    throw Error(fmt::format(
        "KVZAP_TEAM is \"{}\"; expected threads,lanes: two numbers from 1 to 1024", asked));
  }
  shape.threads = static_cast<int>(threads);
  shape.lanes = static_cast<int>(lanes);
  return shape;
}

TeamShape& injected_shape() {
  static TeamShape shape = initial_shape();
  return shape;
}

std::atomic<bool>& forced() {
  static std::atomic<bool> device{initial()};
  return device;
}

}  // namespace

bool uses_device_kernels() { return !runs_on_host || forced().load(std::memory_order_relaxed); }

void set_device_kernels(bool device) { forced() = device; }

TeamShape team_shape(int default_threads, int default_lanes) {
  const TeamShape injected = injected_shape();
#ifdef KOKKOS_ENABLE_SERIAL
  constexpr bool one_thread = std::is_same_v<ExecutionSpace, Kokkos::Serial>;
#else
  constexpr bool one_thread = false;
#endif
  if (one_thread || injected.threads == 0) return {default_threads, default_lanes};
  return injected;
}

void set_team_shape(TeamShape shape) { injected_shape() = shape; }

}  // namespace kvzap::detail
