#include "allocations.hpp"

#include <cstdlib>
#include <new>

#include "base/allocation_hook.hpp"

namespace kvzap::test {

std::size_t n_news = 0;
std::size_t news_until_failure = 0;
bool news_fail = true;

namespace {

std::size_t least_failing_bytes = 0;

/// Whether this call is the one that is to fail.
bool fails(std::size_t bytes) {
  return bytes >= least_failing_bytes && news_until_failure > 0 && --news_until_failure == 0;
}

}  // namespace

FailingAllocation::FailingAllocation(std::int64_t n, std::size_t least_bytes) {
  least_failing_bytes = least_bytes;
  news_fail = !freeing_allocates();
  news_until_failure = n < 0 ? 0 : static_cast<std::size_t>(n) + 1;
  base::allocation_hook = [](std::size_t bytes) {
    if (fails(bytes)) throw std::bad_alloc();
  };
}

FailingAllocation::~FailingAllocation() {
  news_until_failure = 0;
  base::allocation_hook = nullptr;
}

}  // namespace kvzap::test

// The other forms of new and delete, but those for over-aligned types, end here. The one that does
// not throw would do so by itself, were it not that sanitizers bring their own.
void* operator new(std::size_t bytes) {
  ++kvzap::test::n_news;
  if (kvzap::test::news_fail && kvzap::test::fails(bytes)) throw std::bad_alloc();
  if (void* memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  ++kvzap::test::n_news;
  return std::malloc(bytes > 0 ? bytes : 1);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
