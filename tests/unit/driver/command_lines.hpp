// Command lines read as the program reads them, up to the model's shape: no weights, no process.
#pragma once

#include <gtest/gtest.h>

#include <kvzap/core/communicator.hpp>
#include <string>
#include <vector>

#include "commands/support/command_line.hpp"
#include "options/arguments.hpp"
#include "source_dir.hpp"

namespace kvzap::test {

inline const std::string model_folder = test::source_dir().string() + "/inputs/models/recall-4m";
inline const std::string surrogate_folder =
    test::source_dir().string() + "/inputs/models/kvzap-mlp-recall-4m";

/// What the program would print and return before its work starts.
struct Outcome {
  int status = 0;
  std::string error;  // one line, as shown
  std::string out;
  std::vector<std::string> notes;
};

/// Reads the arguments and the deck into `line`, and checks the options; those of `run` and `bench`
/// also against the model.
Outcome read(driver::CommandLine& line, const std::vector<std::string>& arguments);
Outcome read(const std::vector<std::string>& arguments);

/// A command line that fails, with parts of the error that it expects.
struct BadLine {
  std::vector<std::string> flags;
  std::vector<std::string> parts;
  int status = 2;  // the command line is wrong
};
/// Expects every line to fail as it says. Its flags follow `command`.
void expect_errors(const std::vector<std::string>& command, const std::vector<BadLine>& lines);

}  // namespace kvzap::test
