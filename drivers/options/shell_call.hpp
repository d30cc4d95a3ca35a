// Command lines in messages, ready to paste into a shell.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace kvzap::driver {

/// An argument of a command: an option with its value, or a positional argument.
struct Argument {
  std::string flag;  // "--window"; "--window=3" and "-n5" stay in one piece; empty: positional
  std::optional<std::string> value;
};

/// Returns "kvzap COMMAND ARGUMENTS…".
std::string shell_call(const std::string& command, const std::vector<Argument>& arguments);

}  // namespace kvzap::driver
