#include "files/fully.hpp"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "files/temporary_file.hpp"

namespace kvzap::files {

std::int64_t size_of_file(int descriptor) {
  struct stat status = {};
  if (::fstat(descriptor, &status) != 0) throw system_error("cannot be read", errno);
  if (!S_ISREG(status.st_mode)) throw Error("not a regular file");
  return static_cast<std::int64_t>(status.st_size);
}

void read_fully(int descriptor, void* data, std::int64_t bytes, std::int64_t begin) {
  // The system reads at most 2 GiB per call.
  constexpr std::int64_t most = std::int64_t{1} << 30;
  auto* target = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t count =
        ::pread(descriptor, target, static_cast<std::size_t>(std::min(bytes, most)),
                static_cast<off_t>(begin));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw system_error("cannot be read", errno);
    if (count == 0) {
      throw Error(fmt::format("it ends at byte {}; {} more were expected", begin, bytes));
    }
    target += count;
    begin += count;
    bytes -= count;
  }
}

void write_fully(int descriptor, const void* data, std::int64_t bytes, std::int64_t begin) {
  // The system writes at most 2 GiB per call.
  constexpr std::int64_t most = std::int64_t{1} << 30;
  const auto* source = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t count =
        ::pwrite(descriptor, source, static_cast<std::size_t>(std::min(bytes, most)),
                 static_cast<off_t>(begin));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw system_error("cannot be written", errno);
    if (count == 0) throw system_error("cannot be written", ENOSPC);
    source += count;
    begin += count;
    bytes -= count;
  }
}

}  // namespace kvzap::files
