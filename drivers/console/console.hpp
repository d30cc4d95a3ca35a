// Messages for people on standard error: errors, warnings, notes, progress.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <string>
#include <string_view>
#include <utility>

namespace kvzap::driver {

/// Writes the text that fmt::format makes of the arguments to standard error. If it cannot be
/// written (full disk, closed pipe), the text is lost and the run continues.
template <class... Arguments>
void say(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  const std::string text = fmt::format(format, std::forward<Arguments>(arguments)...);
  static_cast<void>(std::fwrite(text.data(), 1, text.size(), stderr));
}

/// Writes a text to standard output at once. flush_stdout tells whether it was lost.
inline void print_now(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

/// Writes a line to standard error, unless that would wait for the reader of a full pipe or of a
/// stopped terminal: then the line is lost. A note tells later how many were.
void say_without_waiting(std::string_view line);

}  // namespace kvzap::driver
