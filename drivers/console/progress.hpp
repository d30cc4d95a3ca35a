// Progress on standard error: a bar on a terminal, sparse lines otherwise.
#pragma once

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kvzap::driver {

/// The form of progress: automatic (a bar on a terminal, otherwise sparse lines), always one of the
/// two, or none.
enum class ProgressStyle { automatic, bar, lines, off };

/// Declares --progress (auto, bar, lines, off).
void declare_progress(CLI::App& app, ProgressStyle& style, const std::string& group);

/// Returns a line of at most `columns` - 1 characters that shows progress: `what`, a bar, per cent,
/// `rate` and time `left` (either may be empty). Omits the least important parts if the line is too
/// short. `share` is in [0, 1].
std::string progress_line(std::string_view what, double share, std::string_view rate,
                          std::string_view left, int columns);

/// The terminal on which a person sees the standard error of this process. This is its own
/// terminal. If standard error is a pipe to mpirun (or another launcher on this node), it is the
/// launcher's terminal. Text on the latter appears at once, whatever output mpirun still has to
/// forward.
class Terminal {
 public:
  /// Finds the terminal. If `forced`, standard error counts as a terminal in any case.
  explicit Terminal(bool forced);
  ~Terminal();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  bool exists() const { return m_descriptor >= 0; }
  int descriptor() const { return m_descriptor; }
  /// Returns whether this process may draw. It may not if the shell has put it, or its launcher,
  /// into the background.
  bool is_ours() const;
  /// Returns its width. If the terminal reports none, returns $COLUMNS, or 80.
  int columns() const;
  /// Writes text. Loses text that cannot be written.
  void write(std::string_view text) const;

 private:
  int m_descriptor = -1;
  bool m_owned = false;
  int m_group = 0;  // process group that draws: this process's group or the launcher's
};

class Progress {
 public:
  /// Prints nothing unless `enabled`.
  explicit Progress(bool enabled, ProgressStyle style = ProgressStyle::automatic);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Reports that `done` of `total` steps of `what` are finished. Shows progress with a rate, in
  /// `unit`s, and an estimate of the time left. A bar is redrawn at most ten times a second; work
  /// of less than a tenth of a second has none. Without a terminal, a line is printed at most every
  /// ten seconds, and a last one if any was printed. Rates and estimates start again with a new
  /// `what`, with fewer steps `done`, and after all steps were done.
  void update(std::string_view what, std::int64_t done, std::int64_t total,
              std::string_view unit = "");
  /// Erases the bar, so that other output can follow.
  void clear();
  /// Resets the state: the next update is a new piece of work, even if it has the same name.
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
  std::optional<Terminal> m_terminal;  // for a bar; absent if lines are printed
  bool m_drawn = false;
  bool m_line_printed = false;
  std::string m_what;
  Clock::time_point m_last;
  Clock::time_point m_start;
  std::int64_t m_done_at_start = 0;
  std::int64_t m_done = 0;
  bool m_has_finished = false;
};

}  // namespace kvzap::driver
