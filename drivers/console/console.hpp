// What the program tells a person on standard error: errors, warnings, notes, progress.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <string>
#include <utility>

namespace kvzap::driver {

/// Writes to standard error what fmt::format makes of the arguments. That nothing may be read or
/// stored there (a full disk, a closed pipe) is no reason to end a run: such text is lost.
template <class... Arguments>
void say(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  const std::string text = fmt::format(format, std::forward<Arguments>(arguments)...);
  static_cast<void>(std::fwrite(text.data(), 1, text.size(), stderr));
}

}  // namespace kvzap::driver
