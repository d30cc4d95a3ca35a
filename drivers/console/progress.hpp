// Progress on standard error: a bar on a terminal, sparse lines otherwise.
#pragma once

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kvzap::driver {

/// How progress is shown: a bar where there is a terminal, sparse lines elsewhere (automatic), or
/// either of them in any case.
enum class ProgressStyle { automatic, bar, lines, off };

/// Declares --progress (auto, bar, lines, off).
void declare_progress(CLI::App& app, ProgressStyle& style, const std::string& group);

/// A line of at most `columns` - 1 characters that shows progress: what, a bar, per cent,
/// `rate` and time `left` (either may be empty), of which what is least needed is left out where
/// there is no room. `share` is of 0 to 1.
std::string progress_line(std::string_view what, double share, std::string_view rate,
                          std::string_view left, int columns);

/// The terminal on which a person sees what this process writes to standard error: its own, or,
/// where standard error is a pipe to mpirun (or another launcher on this node), that of mpirun. On
/// that one things are written at once, whatever mpirun is still to pass on.
class Terminal {
 public:
  /// Finds it. With `forced`, standard error counts as one whatever it is.
  explicit Terminal(bool forced);
  ~Terminal();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  bool exists() const { return m_descriptor >= 0; }
  int descriptor() const { return m_descriptor; }
  /// Whether those who look at it want to see us: not if the shell has sent us, or our launcher, to
  /// the background.
  bool is_ours() const;
  /// Its width; where it does not say, that of $COLUMNS, or 80.
  int columns() const;
  /// What cannot be written is lost.
  void write(std::string_view text) const;

 private:
  int m_descriptor = -1;
  bool m_owned = false;
  int m_group = 0;  // of processes that draw: ours, or the launcher's
};

class Progress {
 public:
  /// Silent unless `enabled`.
  explicit Progress(bool enabled, ProgressStyle style = ProgressStyle::automatic);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// `done` of `total` steps of `what` are finished; what is left is told with a rate, in `unit`s,
  /// and an estimate of its time. A bar is redrawn at most ten times a second, and work of less
  /// than a tenth of one has none;
  /// without a terminal a line is printed at most every ten seconds, and one in the end if any was.
  void update(std::string_view what, std::int64_t done, std::int64_t total,
              std::string_view unit = "");
  /// Takes the bar off the terminal, so that other output can follow.
  void clear();
  /// Forgets what went before: what comes next is a new piece of work, even of the same name.
  void restart() {
    clear();
    m_what.clear();
  }

 private:
  using Clock = std::chrono::steady_clock;
  double seconds_since_start(Clock::time_point now) const;
  std::string rate(Clock::time_point now, std::int64_t done, std::string_view unit) const;
  std::string time_left(Clock::time_point now, std::int64_t done, std::int64_t total) const;
  bool m_enabled;
  std::optional<Terminal> m_terminal;  // of a bar; without one there are lines
  bool m_drawn = false;
  bool m_line_printed = false;
  std::string m_what;
  Clock::time_point m_last;
  Clock::time_point m_start;
  std::int64_t m_done_at_start = 0;
};

}  // namespace kvzap::driver
