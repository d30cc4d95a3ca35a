// Pages of mapped files.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace kvzap::files {

/// Lets the system drop the whole pages between `data` and `data + bytes` of a read-only mapping.
/// Pages at the ends hold parts of neighbours and stay. A later access reads the file again.
inline void release_pages(const std::byte* data, std::size_t bytes) {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<std::uintptr_t>(data) + page - 1) / page * page;
  const auto end = (reinterpret_cast<std::uintptr_t>(data) + bytes) / page * page;
  if (begin < end) {
    static_cast<void>(::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED));
  }
}

}  // namespace kvzap::files
