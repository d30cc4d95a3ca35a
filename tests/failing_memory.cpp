#include "failing_memory.hpp"

#include <cstdlib>
#include <new>

#include "base/scratch.hpp"

namespace kvzap::test {
namespace {

std::int64_t left = -1;

/// Whether this allocation is the one.
bool fails() { return left >= 0 && left-- == 0; }

}  // namespace

FailingAllocation::FailingAllocation(std::int64_t n) {
  left = n;
  detail::allocation_hook = [](std::size_t) {
    if (fails()) throw std::bad_alloc();
  };
}

FailingAllocation::~FailingAllocation() {
  left = -1;
  detail::allocation_hook = nullptr;
}

}  // namespace kvzap::test

void* operator new(std::size_t bytes) {
  void* const memory = kvzap::test::fails() ? nullptr : std::malloc(bytes > 0 ? bytes : 1);
  if (!memory) throw std::bad_alloc();
  return memory;
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return kvzap::test::fails() ? nullptr : std::malloc(bytes > 0 ? bytes : 1);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
