// Counts what the whole program asks of operator new, and lets allocations fail.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvzap::test {

/// Calls of operator new so far.
extern std::size_t n_news;

/// If not 0, counts down with each call of the form that throws; the one that reaches 0 finds no
/// memory.
extern std::size_t news_until_failure;

/// Whether the destructor of a view allocates, as it does in Kokkos 4, which names a fence there.
/// An operator new that fails would end the program.
bool freeing_allocates();

/// As long as it lives, and once: the n-th allocation from now on, by operator new (unless
/// freeing_allocates) or of the library's views and pages, throws std::bad_alloc; none if n is
/// negative. Smaller allocations than `least_bytes` do not count.
class FailingAllocation {
 public:
  explicit FailingAllocation(std::int64_t n, std::size_t least_bytes = 0);
  ~FailingAllocation();
  FailingAllocation(const FailingAllocation&) = delete;
  FailingAllocation& operator=(const FailingAllocation&) = delete;
};

}  // namespace kvzap::test
