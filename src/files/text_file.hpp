// Reading of whole files.
#pragma once

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <kvzap/core/types.hpp>
#include <limits>
#include <string>
#include <system_error>

#include "files/waiting.hpp"

namespace kvzap::files {

/// Returns all bytes of an open file, which stays open. Unlike with streams, a read that fails in
/// the middle is an error and not an end of file. Throws Error that begins with `name` if reading
/// fails, if it is a folder, or if it has more than `most` bytes.
inline std::string read_text(int descriptor, const std::string& name,
                             std::uintmax_t most = std::numeric_limits<std::uintmax_t>::max()) {
  std::string text;
  std::array<char, std::size_t{64} << 10> block = {};
  const Waiting waiting(descriptor, Waiting::For::input);
  for (;;) {
    const ssize_t count = ::read(descriptor, block.data(), block.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EISDIR) {
      throw Error(fmt::format("{}: is a folder; expected a file", name));
    }
    if (count < 0) {
      throw Error(fmt::format("{}: reading failed after {} bytes: {}", name, text.size(),
                              std::generic_category().message(errno)));
    }
    if (count == 0) return text;
    text.append(block.data(), static_cast<std::size_t>(count));
    if (text.size() > most) {
      throw Error(fmt::format("{}: too large: expected at most {} bytes", name, most));
    }
  }
}

/// Does the same for the file of that name.
inline std::string read_text(const std::filesystem::path& file,
                             std::uintmax_t most = std::numeric_limits<std::uintmax_t>::max()) {
  const std::string name = file.string();
  const Waiting waiting(file, Waiting::For::input);
  const int descriptor = ::open(name.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) {
    throw Error(
        fmt::format("{}: cannot be opened: {}", name, std::generic_category().message(errno)));
  }
  struct Closes {
    int descriptor;
    ~Closes() { ::close(descriptor); }
  } const closes{descriptor};
  return read_text(descriptor, name, most);
}

}  // namespace kvzap::files
