// Files in the address space.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>

namespace kvzap::files {

/// A file mapped read-only. If another process shortens the file while it is mapped, an access ends
/// this process (SIGBUS), as with every mapping.
class MappedFile {
 public:
  /// Throws Error if `file` is not a regular file, is empty or cannot be mapped.
  explicit MappedFile(const std::filesystem::path& file);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::byte* data() const { return m_data; }
  std::size_t size() const { return m_size; }

 private:
  std::byte* m_data = nullptr;
  std::size_t m_size = 0;
};

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
