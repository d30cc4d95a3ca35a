#include "base/huge_pages.hpp"

#include <cstdint>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kvzap::base {

void advise_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] std::size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  // Whole small pages only: the system itself finds the huge pages that fit.
  constexpr std::uintptr_t page = 4096;
  if (bytes < huge_page_bytes) return;
  const auto begin = (reinterpret_cast<std::uintptr_t>(data) + page - 1) / page * page;
  const auto end = (reinterpret_cast<std::uintptr_t>(data) + bytes) / page * page;
  // A failure only costs speed.
  (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

void advise_fresh_huge_pages(void* data, std::size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  (void)madvise(data, bytes, MADV_DONTNEED);
#endif
  advise_huge_pages(data, bytes);
}

}  // namespace kvzap::base
