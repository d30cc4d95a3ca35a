// Lets tests fail allocations of memory that operator new does not provide.
#pragma once

#include <cstddef>

namespace kvzap::base {

/// Called with the number of bytes before a cache or its scratch memory allocates; may throw the
/// exceptions of an allocation. Tests use it to make any allocation fail. Do not change it while
/// other threads allocate.
using AllocationHook = void (*)(std::size_t bytes);
inline AllocationHook allocation_hook = nullptr;

inline void before_allocation(std::size_t bytes) {
  if (allocation_hook) allocation_hook(bytes);
}

}  // namespace kvzap::base
