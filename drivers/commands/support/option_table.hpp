// Options and commands of the program for help, man page and completion.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace kvzap::driver {

enum class ValueKind { none, any, choice, policy, folder, file, model };

/// An option as the documents show it.
struct Entry {
  std::vector<std::string> flags;  // "-m", "--model"; none: a positional argument
  std::string name;                // for a positional argument
  std::string type;                // "INT", "DIR", ...
  std::vector<std::string> choices;
  std::string description;
  std::string default_text;
  std::string group;
  ValueKind kind = ValueKind::any;
  bool repeats = false;
  bool is_required = false;
};

/// Returns the options in the order in which they were declared.
std::vector<Entry> entries_of(const CLI::App& app);
std::vector<const CLI::App*> commands_of(const CLI::App& app);

}  // namespace kvzap::driver
