// Progress on standard error: a bar on a terminal, sparse lines otherwise.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvzap::driver {

class Progress {
 public:
  /// Silent unless `enabled`.
  explicit Progress(bool enabled);
  ~Progress();

  /// `done` of `total` steps of `what` are finished; what is left is told with an estimate of its
  /// time. A bar is redrawn at most ten times a second;
  /// without a terminal a line is printed at most every ten seconds, and one in the end if any was.
  void update(std::string_view what, std::int64_t done, std::int64_t total);
  /// Takes the bar off the terminal, so that other output can follow.
  void clear();
  /// Forgets what went before: what comes next is a new piece of work, even of the same name.
  void restart() {
    clear();
    m_what.clear();
  }

 private:
  using Clock = std::chrono::steady_clock;
  std::string time_left(Clock::time_point now, std::int64_t done, std::int64_t total) const;
  bool m_enabled;
  bool m_terminal;
  bool m_drawn = false;
  bool m_line_printed = false;
  std::string m_what;
  Clock::time_point m_last;
  Clock::time_point m_start;
  std::int64_t m_done_at_start = 0;
};

}  // namespace kvzap::driver
