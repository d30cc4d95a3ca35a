#include "unit/count_news.hpp"

#include <cstdlib>
#include <new>

namespace kvzap::test {
std::size_t n_news = 0;
std::size_t news_until_failure = 0;
}  // namespace kvzap::test

namespace {

/// Whether this call is the one that is to fail.
bool fails() {
  using kvzap::test::news_until_failure;
  return news_until_failure > 0 && --news_until_failure == 0;
}

}  // namespace

// The other forms of new and delete, but those for over-aligned types, end here. The one that does
// not throw would do so by itself, were it not that sanitizers bring their own.
void* operator new(std::size_t bytes) {
  ++kvzap::test::n_news;
  if (fails()) throw std::bad_alloc();
  if (void* memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  ++kvzap::test::n_news;
  return std::malloc(bytes > 0 ? bytes : 1);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
