// A file without a place on a disk, and how bytes get into files.
#pragma once

#include <cstdint>
#include <filesystem>

namespace kvzap::detail {

/// Writes all of it, whatever the system makes of one call. Throws Error, without the file's name.
void write_fully(int descriptor, const void* data, std::int64_t bytes, std::int64_t begin);

/// An empty file in memory, gone with this object; where the system has none, in the folder for
/// temporary files. Bytes that were never written take no room.
class MemoryFile {
 public:
  /// Throws Error if there is no such file to be had, or if it could not grow to so many bytes:
  /// HDF5 must not find that out, which crashes later if it cannot write.
  explicit MemoryFile(std::int64_t most_bytes);
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  int descriptor() const { return m_descriptor; }
  /// Under which this process can open it once more.
  const std::filesystem::path& path() const { return m_path; }
  std::int64_t bytes() const;
  /// Frees the room of these bytes, if it can; they then read as 0.
  void punch(std::int64_t begin, std::int64_t bytes) const;

 private:
  void open();
  void close();

  int m_descriptor = -1;
  bool m_is_named = false;
  std::filesystem::path m_path;
};

}  // namespace kvzap::detail
