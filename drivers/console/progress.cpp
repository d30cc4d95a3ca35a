#include "console/progress.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>

#include "console/console.hpp"
#include "console/signals.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;

/// Returns the contents of a file in /proc, whose size is unknown; empty if it cannot be read.
std::string text_of_process(int process, const char* file) {
  std::ifstream stream(fmt::format("/proc/{}/{}", process, file), std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

/// Returns the parent from proc(5)'s "process (name) state parent ..."; 0 if unknown.
int parent_of(int process) {
  const std::string text = text_of_process(process, "stat");
  const std::size_t name_end = text.rfind(") ");
  if (name_end == std::string::npos) return 0;
  constexpr std::size_t state = 4;  // ") S "
  return std::atoi(text.c_str() + std::min(text.size(), name_end + state));
}

bool is_launcher(int process) {
  std::string name = text_of_process(process, "comm");
  if (!name.empty() && name.back() == '\n') name.pop_back();
  constexpr std::string_view launchers[] = {
      "mpirun", "mpiexec", "orterun", "oshrun", "orted",           "prterun",
      "prted",  "prte",    "prun",    "srun",   "hydra_pmi_proxy", "hydra_bstrap_pr"};
  return std::find(std::begin(launchers), std::end(launchers), name) != std::end(launchers) ||
         name.rfind("mpiexec.", 0) == 0 || name.rfind("mpirun.", 0) == 0;
}

/// Returns whether the launcher adds a prefix to each line, or forwards only whole lines. It would
/// break a bar, which is part of a line.
bool marks_lines(int launcher) {
  const std::string arguments = text_of_process(launcher, "cmdline");
  constexpr std::string_view marking[] = {"tag-output",   "timestamp-output", "output-filename",
                                          "prepend-rank", "outfile-pattern",  "errfile-pattern",
                                          "xterm"};
  for (std::size_t begin = 0; begin < arguments.size();) {
    const std::size_t end = std::min(arguments.find('\0', begin), arguments.size());
    const std::string_view argument(arguments.data() + begin, end - begin);
    begin = end + 1;
    if (argument == "-l" || argument == "--label" || argument == "--output") return true;
    for (const std::string_view option : marking) {
      if (argument == "-" + std::string(option) || argument == "--" + std::string(option)) {
        return true;
      }
    }
  }
  return false;
}

/// Returns whether the process has the pipe that /proc calls `pipe` open, so that it reads our
/// output.
bool has_open(int process, const fs::path& pipe) {
  std::error_code failed;
  fs::directory_iterator entry(fmt::format("/proc/{}/fd", process), failed);
  for (; !failed && entry != fs::directory_iterator(); entry.increment(failed)) {
    std::error_code gone;
    if (fs::read_symlink(entry->path(), gone) == pipe) return true;
  }
  return false;
}

/// Returns the launcher among the ancestors of this process that forwards this process' output to
/// `stream` to its own standard error, a terminal.
std::optional<int> launcher_with_terminal(int stream) {
  struct stat status = {};
  if (fstat(stream, &status) != 0 || !(S_ISFIFO(status.st_mode) || S_ISSOCK(status.st_mode))) {
    return std::nullopt;
  }
  std::error_code failed;
  const fs::path pipe = fs::read_symlink(fmt::format("/proc/self/fd/{}", stream), failed);
  if (failed) return std::nullopt;
  bool is_passed_on = false;
  constexpr int most = 16;
  int process = getppid();
  for (int i = 0; i < most && process > 1; ++i, process = parent_of(process)) {
    if (!is_launcher(process)) continue;
    if (marks_lines(process)) return std::nullopt;
    is_passed_on = is_passed_on || has_open(process, pipe);
    if (!is_passed_on) return std::nullopt;  // another process reads the output first
    const fs::path terminal =
        fs::read_symlink(fmt::format("/proc/{}/fd/{}", process, STDERR_FILENO), failed);
    if (!failed && terminal.string().rfind("/dev/", 0) == 0) return process;
  }
  return std::nullopt;
}

}  // namespace

void declare_progress(CLI::App& app, ProgressStyle& style, const std::string& group) {
  static const std::map<std::string, ProgressStyle> styles = {{"auto", ProgressStyle::automatic},
                                                              {"bar", ProgressStyle::bar},
                                                              {"lines", ProgressStyle::lines},
                                                              {"off", ProgressStyle::off}};
  app.add_option_function<std::string>(
         "--progress", [&style](const std::string& name) { style = styles.at(name); },
         "form of progress on standard error: auto (a bar on a terminal, also on mpirun's; else a "
         "line every 10 s), bar, lines or off")
      ->type_name("HOW")
      ->default_str("auto")
      ->check(CLI::IsMember({"auto", "bar", "lines", "off"}))
      ->group(group);
}

Terminal::Terminal(bool forced) : m_group(static_cast<int>(getpgrp())) {
  if (forced || isatty(STDERR_FILENO) != 0) {
    m_descriptor = STDERR_FILENO;
    if (isatty(STDERR_FILENO) != 0) return;
  }
  const auto launcher = launcher_with_terminal(STDERR_FILENO);
  if (!launcher) return;
  const std::string name = fmt::format("/proc/{}/fd/{}", *launcher, STDERR_FILENO);
  const int terminal = open(name.c_str(), O_WRONLY | O_NOCTTY | O_CLOEXEC);
  if (terminal < 0) return;
  termios settings = {};
  // With TOSTOP, which is rarely set, drawing from another process group would stop this process.
  if (isatty(terminal) == 0 || tcgetattr(terminal, &settings) != 0 ||
      (settings.c_lflag & TOSTOP) != 0) {
    close(terminal);
    return;
  }
  m_descriptor = terminal;
  m_owned = true;
  m_group = static_cast<int>(getpgid(*launcher));
}

Terminal::~Terminal() {
  if (m_owned) close(m_descriptor);
}

bool Terminal::is_ours() const {
  const auto group = tcgetpgrp(m_descriptor);  // fails if it is not the controlling terminal
  return group < 0 || group == m_group;
}

int Terminal::columns() const {
  winsize size = {};
  if (ioctl(m_descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  const char* text = std::getenv("COLUMNS");
  const int columns = text ? std::atoi(text) : 0;
  constexpr int usual = 80;
  return columns > 0 ? columns : usual;
}

void Terminal::write(std::string_view text) const {
  while (!text.empty()) {
    const ssize_t written = ::write(m_descriptor, text.data(), text.size());
    if (written <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

std::string progress_line(std::string_view what, double share, std::string_view rate,
                          std::string_view left, int columns) {
  // The last column stays free, because a terminal may move to the next line after a character in
  // it.
  const auto room = static_cast<std::size_t>(std::max(columns - 1, 0));
  share = std::min(std::max(share, 0.0), 1.0);
  const std::string name = fmt::format("{:8} ", what);
  const std::string percent = fmt::format("{:3}%", static_cast<int>(100 * share));
  constexpr std::size_t shortest = 10, longest = 40, brackets = 3;
  std::string notes;
  const auto fits = [&](const std::string& more, std::size_t bar) {
    return name.size() + percent.size() + more.size() + (bar > 0 ? bar + brackets : 0) <= room;
  };
  // The time left is more useful than the rate.
  std::string all;
  if (!rate.empty()) all += fmt::format("  {}", rate);
  if (!left.empty()) all += fmt::format("{}{} left", all.empty() ? "  " : ", ", left);
  const std::string less = left.empty() ? "" : fmt::format("  {} left", left);
  if (fits(all, shortest)) {
    notes = all;
  } else if (fits(less, 0)) {
    notes = less;
  }
  std::string line = name;
  if (fits(notes, shortest)) {
    const std::size_t width =
        std::min(longest, room - name.size() - percent.size() - notes.size() - brackets);
    const auto filled = static_cast<std::size_t>(static_cast<double>(width) * share);
    line += fmt::format("[{:#<{}}{:.<{}}] ", "", filled, "", width - filled);
  }
  line += percent + notes;
  if (line.size() > room) line = fmt::format("{} {}", what, percent);
  line.resize(std::min(line.size(), room));
  return line;
}

Progress::Progress(bool enabled, ProgressStyle style)
    : m_enabled(enabled && style != ProgressStyle::off) {
  if (!m_enabled || style == ProgressStyle::lines) return;
  m_terminal.emplace(style == ProgressStyle::bar);
  if (!m_terminal->exists()) m_terminal.reset();
}

Progress::~Progress() { clear(); }

double Progress::seconds_since_start(Clock::time_point now) const {
  return std::chrono::duration<double>(now - m_start).count();
}

// Returns the rate since the first call; empty while it is not meaningful.
std::string Progress::rate(Clock::time_point now, std::int64_t done, std::string_view unit) const {
  const double seconds = seconds_since_start(now);
  if (unit.empty() || seconds < 0.5 || done <= m_done_at_start) return "";
  const double rate = static_cast<double>(done - m_done_at_start) / seconds;
  constexpr double minute = 60;
  if (rate < 1) return fmt::format("{:.1f} {}/min", rate * minute, unit);
  return fmt::format("{:.{}f} {}/s", rate, rate < 10 ? 1 : 0, unit);
}

// Returns the time left at the rate since the first call; empty while it is not meaningful.
std::string Progress::time_left(Clock::time_point now, std::int64_t done,
                                std::int64_t total) const {
  const double seconds = seconds_since_start(now);
  if (seconds < 2 || done <= m_done_at_start || done >= total) return "";
  const double left =
      seconds * static_cast<double>(total - done) / static_cast<double>(done - m_done_at_start);
  constexpr double minute = 60, hour = 3600;
  if (left < 2 * minute) return fmt::format("about {:.0f} s", std::max(1.0, left));
  if (left < 2 * hour) return fmt::format("about {:.0f} min", left / minute);
  return fmt::format("about {:.1f} h", left / hour);
}

void Progress::update(std::string_view what, std::int64_t done, std::int64_t total,
                      std::string_view unit) {
  if (!m_enabled || total <= 0) return;
  const auto now = Clock::now();
  if (what != m_what || done < m_done || m_has_finished) {
    clear();
    m_what = what;
    m_last = m_start = now;
    m_done_at_start = done;
    m_line_printed = false;
  }
  const double seconds = std::chrono::duration<double>(now - m_last).count();
  const bool finished = done >= total;
  m_done = done;
  m_has_finished = finished;
  if (m_terminal) {
    if (seconds < 0.1 && !(finished && m_drawn)) return;
    if (!m_terminal->is_ours() || may_be_killed_soon()) return;
    const std::string line =
        progress_line(what, static_cast<double>(done) / static_cast<double>(total),
                      rate(now, done, unit), time_left(now, done, total), m_terminal->columns());
    // Sets the handler that erases the bar first, because a signal may arrive right after.
    if (!m_drawn) erase_bar_at_the_end();
    terminal_with_bar = m_terminal->descriptor();
    m_terminal->write(fmt::format("\r{}\033[K", line));
    m_drawn = true;
    if (may_be_killed_soon()) take_bar_away();  // a signal arrived during this function
    m_last = now;
  } else if (seconds >= 10 || (finished && m_line_printed)) {
    const std::string speed = rate(now, done, unit), left = time_left(now, done, total);
    say("{}: {} of {} ({}%){}{}\n", what, done, total, 100 * done / total,
        speed.empty() ? "" : ", " + speed, left.empty() ? "" : ", " + left + " left");
    m_line_printed = !finished;
    m_last = now;
  }
}

void Progress::clear() {
  if (m_drawn) {
    m_terminal->write(erase_line);
    terminal_with_bar = -1;
    // This text may still be on its way through mpirun when the next bar is due.
    m_last = Clock::now();
  }
  m_drawn = false;
}

}  // namespace kvzap::driver
