// Command lines in messages, ready to paste into a shell.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap::driver {

/// An argument of a command: an option with its value, or a positional argument.
struct Argument {
  std::string flag;  // "--window"; "--window=3" and "-n5" stay in one piece; empty: positional
  std::optional<std::string> value;
};

/// Returns "kvzap COMMAND ARGUMENTS…".
std::string shell_call(const std::string& command, const std::vector<Argument>& arguments);

/// Returns the command that downloads a checkpoint from Hugging Face's hub. `name`: "owner/name",
/// or "owner/name:Q4_K_M", as llama.cpp names a file of it.
std::string download_call(const std::string& name);
/// Returns the name of the folder that this command makes.
std::string folder_of_download(const std::string& name);

}  // namespace kvzap::driver
