#include "io/memory_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <string>

#include "files/fully.hpp"
#include "files/temporary_file.hpp"

namespace kvzap::io {

MemoryFile::MemoryFile(std::int64_t most_bytes) {
  open();
  int code = 0;
  do {
    code = ::ftruncate(m_descriptor, static_cast<off_t>(most_bytes)) == 0 ? 0 : errno;
  } while (code == EINTR);
  if (code != 0) {
    close();
    throw files::system_error(fmt::format("no room for {} bytes", most_bytes), code);
  }
}

MemoryFile::~MemoryFile() { close(); }

void MemoryFile::open() {
#if defined(__linux__) && defined(MFD_CLOEXEC)
  m_descriptor = ::memfd_create("kvzap-snapshot", MFD_CLOEXEC);
  if (m_descriptor >= 0) {
    m_path = fmt::format("/proc/self/fd/{}", m_descriptor);
    if (::access(m_path.c_str(), R_OK | W_OK) == 0) return;
    ::close(m_descriptor);  // no /proc
  }
#endif
  std::string pattern = (std::filesystem::temp_directory_path() / "kvzap-XXXXXX").string();
  m_descriptor = ::mkstemp(pattern.data());
  if (m_descriptor < 0) throw files::system_error("no file for its structure", errno);
  m_is_named = true;
  m_path = pattern;
}

void MemoryFile::close() {
  ::close(m_descriptor);
  if (m_is_named) ::unlink(m_path.c_str());
}

std::int64_t MemoryFile::bytes() const { return files::size_of_file(m_descriptor); }

void MemoryFile::punch([[maybe_unused]] std::int64_t begin,
                       [[maybe_unused]] std::int64_t bytes) const {
#if defined(__linux__) && defined(FALLOC_FL_PUNCH_HOLE)
  // Bytes that cannot be freed stay until the file is freed.
  const int ignored =
      ::fallocate(m_descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin, bytes);
  static_cast<void>(ignored);
#endif
}

}  // namespace kvzap::io
