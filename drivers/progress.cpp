#include "progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

#include "console.hpp"

namespace kvzap::driver {

Progress::Progress(bool enabled) : m_enabled(enabled), m_terminal(isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() { clear(); }

// What is left if it goes on as fast as since the first call; empty as long as that says little.
std::string Progress::time_left(Clock::time_point now, std::int64_t done,
                                std::int64_t total) const {
  const double seconds = std::chrono::duration<double>(now - m_start).count();
  if (seconds < 2 || done <= m_done_at_start || done >= total) return "";
  const double left =
      seconds * static_cast<double>(total - done) / static_cast<double>(done - m_done_at_start);
  constexpr double minute = 60, hour = 3600;
  if (left < 2 * minute) return fmt::format(", about {:.0f} s left", left);
  if (left < 2 * hour) return fmt::format(", about {:.0f} min left", left / minute);
  return fmt::format(", about {:.1f} h left", left / hour);
}

void Progress::update(std::string_view what, std::int64_t done, std::int64_t total) {
  if (!m_enabled || total <= 0) return;
  const auto now = Clock::now();
  if (what != m_what) {
    clear();
    m_what = what;
    m_last = m_start = now;
    m_done_at_start = done;
    m_line_printed = false;
  }
  const double seconds = std::chrono::duration<double>(now - m_last).count();
  const bool finished = done >= total;
  if (m_terminal) {
    if (m_drawn && seconds < 0.1 && !finished) return;
    constexpr int width = 40;
    const int filled = static_cast<int>(width * done / total);
    say("\r{:8} [{:#<{}}{:.<{}}] {:3}%{}\033[K", what, "", filled, "", width - filled,
        100 * done / total, time_left(now, done, total));
    std::fflush(stderr);
    m_drawn = true;
    m_last = now;
  } else if (seconds >= 10 || (finished && m_line_printed)) {
    say("{}: {} of {} ({}%){}\n", what, done, total, 100 * done / total,
        time_left(now, done, total));
    m_line_printed = !finished;
    m_last = now;
  }
}

void Progress::clear() {
  if (m_drawn) say("\r\033[K");
  m_drawn = false;
}

}  // namespace kvzap::driver
