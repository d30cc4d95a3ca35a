// Values that the host writes for kernels.
#pragma once

#include "base/kokkos_compat.hpp"
#include "base/scratch.hpp"

namespace kvzap::base {

/// Values that the host writes and kernels read. A copy on the caller's instance brings them to the
/// device without waiting, so the host may not write the next ones before that copy is complete.
/// Decode steps on devices copy once and wait at their end.
template <class Value>
class Staged {
 public:
  using Device = Kokkos::View<Value*, MemorySpace>;

  /// As reserve_scratch.
  void reserve(std::int64_t count, const char* label) {
    reserve_scratch(m_device, count, label);
    reserve_scratch(m_host, count, label);
  }
  void release() {
    m_device = {};
    m_host = {};
  }

  Value* host() const { return m_host.data(); }
  const Device& device() const { return m_device; }
  /// Brings the first `count` values to the device.
  void copy(const ExecutionSpace& exec, std::int64_t count) const {
    const auto all = std::make_pair(std::int64_t{0}, count);
    Kokkos::deep_copy(exec, Kokkos::subview(m_device, all), Kokkos::subview(m_host, all));
  }

 private:
  Device m_device;
  Kokkos::View<Value*, StagingSpace> m_host;
};

}  // namespace kvzap::base
