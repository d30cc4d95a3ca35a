// Files opened by open(2).
#pragma once

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <filesystem>

#include "files/waiting.hpp"

namespace kvzap::files {

/// An open file that is closed on destruction.
class FileDescriptor {
 public:
  /// Calls open(2); the umask applies to the mode of a new file. If it fails, `get()` is negative
  /// and errno has the reason.
  FileDescriptor(const std::filesystem::path& file, int flags, mode_t mode = 0666) {
    const bool reads = (flags & O_ACCMODE) == O_RDONLY;
    const Waiting waiting(file, reads ? Waiting::For::input : Waiting::For::output);
    m_descriptor = ::open(file.c_str(), flags, mode);
  }
  ~FileDescriptor() {
    if (m_descriptor >= 0) ::close(m_descriptor);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return m_descriptor; }

 private:
  int m_descriptor = -1;
};

}  // namespace kvzap::files
