// A file in memory, and complete writes to files.
#pragma once

#include <cstdint>
#include <filesystem>

namespace kvzap::io {

/// An empty file in memory that is freed with this object. If the system has none, it is in the
/// folder for temporary files. Bytes that were never written take no memory.
class MemoryFile {
 public:
  /// Throws Error if no such file can be created, or if it could not grow to this size. HDF5 must
  /// not be the first to notice, because it crashes later if it cannot write.
  explicit MemoryFile(std::int64_t most_bytes);
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  int descriptor() const { return m_descriptor; }
  /// Returns a path under which this process can open it again.
  const std::filesystem::path& path() const { return m_path; }
  std::int64_t bytes() const;
  /// Frees these bytes if the system allows it. They then read as 0.
  void punch(std::int64_t begin, std::int64_t bytes) const;

 private:
  void open();
  void close();

  int m_descriptor = -1;
  bool m_is_named = false;
  std::filesystem::path m_path;
};

}  // namespace kvzap::io
