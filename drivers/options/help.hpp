// The --help texts of the program and of its commands.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace kvzap::driver {

/// Returns the columns for help: the value of COLUMNS or the width of the terminal on standard
/// output, from 60 to 120; 80 if neither is known.
int help_columns();

/// An environment variable that the program reads, for its help and its man page.
struct EnvironmentVariable {
  std::string name;
  std::string description;
};
const std::vector<EnvironmentVariable>& environment_variables();

/// Returns command lines for the end of a command's help. Files and
/// folders in them are the user's.
const std::vector<std::string>& examples_of(const std::string& command);

/// Writes help with lines of at most help_columns(): flags, their values, their meaning, defaults.
/// Omits details that only the parser needs.
class HelpFormatter : public CLI::FormatterBase {
 public:
  std::string make_help(const CLI::App* app, std::string name,
                        CLI::AppFormatMode mode) const override;
};

}  // namespace kvzap::driver
