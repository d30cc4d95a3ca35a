// The best rates of a device: the form of LimitKernels for memory and products of devices.
#pragma once

#include <kvzap/core/types.hpp>

namespace kvzap::perf {

/// What one lane loads at once.
struct alignas(16) LaneValues {
  float x[4];
};

/// One pass over each limit, on arrays of LimitKernels::working_set and products of its extents.
/// Each call waits for its kernel.
class DeviceLimits {
 public:
  /// Allocates and fills the working set.
  DeviceLimits();
  /// Sums the working set.
  void read();
  /// Reads half of the working set and writes the other half.
  void copy();
  /// A product with operands of this type (f32 or bf16) and an f32 result.
  void multiply(DType dtype);

 private:
  ExecutionSpace m_exec;
  Kokkos::View<LaneValues*, MemorySpace> m_memory;
};

}  // namespace kvzap::perf
