#include "progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

namespace kvzap::driver {

Progress::Progress(bool enabled) : m_enabled(enabled), m_terminal(isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() { clear(); }

void Progress::update(std::string_view what, std::int64_t done, std::int64_t total) {
  if (!m_enabled || total <= 0) return;
  const auto now = Clock::now();
  if (what != m_what) {
    clear();
    m_what = what;
    m_last = now;
    m_line_printed = false;
  }
  const double seconds = std::chrono::duration<double>(now - m_last).count();
  const bool finished = done >= total;
  if (m_terminal) {
    if (m_drawn && seconds < 0.1 && !finished) return;
    constexpr int width = 40;
    const int filled = static_cast<int>(width * done / total);
    fmt::print(stderr, "\r{:8} [{:#<{}}{:.<{}}] {:3}%", what, "", filled, "", width - filled,
               100 * done / total);
    std::fflush(stderr);
    m_drawn = true;
    m_last = now;
  } else if (seconds >= 10 || (finished && m_line_printed)) {
    fmt::print(stderr, "{}: {} of {} ({}%)\n", what, done, total, 100 * done / total);
    m_line_printed = !finished;
    m_last = now;
  }
}

void Progress::clear() {
  if (m_drawn) fmt::print(stderr, "\r\033[K");
  m_drawn = false;
}

}  // namespace kvzap::driver
