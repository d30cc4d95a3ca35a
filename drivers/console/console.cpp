#include "console/console.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>

#include "files/counted.hpp"

namespace kvzap::driver {
namespace {

std::atomic<std::int64_t> lost_lines{0};

/// Returns whether standard error takes PIPE_BUF bytes at once, or fails at once.
bool is_ready() {
  pollfd output = {STDERR_FILENO, POLLOUT, 0};
  return poll(&output, 1, 0) == 1;
}

}  // namespace

void say_without_waiting(std::string_view line) {
  if (!is_ready()) {
    ++lost_lines;
    return;
  }
  std::string text;
  if (const std::int64_t lost = lost_lines.exchange(0); lost > 0) {
    text = fmt::format("kvzap: note: {} lost: nobody read standard error\n",
                       files::counted(lost, "line"));
  }
  text += line;
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t size = write(STDERR_FILENO, text.data() + done,
                               std::min<std::size_t>(PIPE_BUF, text.size() - done));
    if (size < 0 && errno != EINTR) return;
    if (size > 0) done += static_cast<std::size_t>(size);
    if (done < text.size() && !is_ready()) {
      ++lost_lines;
      return;
    }
  }
}

}  // namespace kvzap::driver
