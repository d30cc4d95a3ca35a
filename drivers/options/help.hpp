// --help of the program and of its commands.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace kvzap::driver {

/// Columns of the terminal that standard output is, or what the environment variable COLUMNS says,
/// from 60 to 120; 80 where neither is known.
int help_columns();

/// What the program reads from the environment, for its help and its man page.
struct EnvironmentVariable {
  std::string name;
  std::string description;
};
const std::vector<EnvironmentVariable>& environment_variables();

/// Writes help so that no line is wider than help_columns(), without what only the parser needs to
/// know: flags, what they take, what they mean, defaults.
class HelpFormatter : public CLI::FormatterBase {
 public:
  std::string make_help(const CLI::App* app, std::string name,
                        CLI::AppFormatMode mode) const override;
};

}  // namespace kvzap::driver
