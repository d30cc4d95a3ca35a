#include "files/mapped_file.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <kvzap/core/types.hpp>
#include <system_error>
#include <utility>

#include "files/file_descriptor.hpp"

namespace kvzap::files {

namespace fs = std::filesystem;

MappedFile::MappedFile(const fs::path& file) {
  const FileDescriptor descriptor(file, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor.get() < 0) {
    throw Error(fmt::format("{}: cannot be opened: {}", file.string(),
                            std::generic_category().message(errno)));
  }
  struct stat status = {};
  if (::fstat(descriptor.get(), &status) != 0) {
    throw Error(fmt::format("{}: cannot be read: {}", file.string(),
                            std::generic_category().message(errno)));
  }
  if (!S_ISREG(status.st_mode)) {
    throw Error(fmt::format("{}: not a regular file; expected one", file.string()));
  }
  if (status.st_size <= 0) {
    throw Error(fmt::format("{}: the file is empty: expected at least 8 bytes", file.string()));
  }
  m_size = static_cast<std::size_t>(status.st_size);
  void* const address = ::mmap(nullptr, m_size, PROT_READ, MAP_PRIVATE, descriptor.get(), 0);
  if (address == MAP_FAILED) {
    throw Error(fmt::format("{}: cannot be mapped: {}", file.string(),
                            std::generic_category().message(errno)));
  }
  m_data = static_cast<std::byte*>(address);
  // Weights are copied once, front to back. This is only a hint, so a refusal does not matter.
  static_cast<void>(::madvise(address, m_size, MADV_SEQUENTIAL));
}

MappedFile::~MappedFile() {
  if (m_data != nullptr) ::munmap(m_data, m_size);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : m_data(std::exchange(other.m_data, nullptr)), m_size(std::exchange(other.m_size, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(m_data, other.m_data);
  std::swap(m_size, other.m_size);
  return *this;
}

}  // namespace kvzap::files
