// Lets an allocation fail.
#pragma once

#include <cstdint>

namespace kvzap::test {

/// As long as it lives, and once: the n-th allocation from now on (of the program by operator new,
/// or of the library's scratch memory, views and pages) throws std::bad_alloc; none if n is
/// negative.
class FailingAllocation {
 public:
  explicit FailingAllocation(std::int64_t n);
  ~FailingAllocation();
  FailingAllocation(const FailingAllocation&) = delete;
  FailingAllocation& operator=(const FailingAllocation&) = delete;
};

}  // namespace kvzap::test
