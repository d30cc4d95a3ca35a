// `kvzap make-tasks`: prompts with known answers, of any length.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <kvzap/core/communicator.hpp>
#include <string>
#include <vector>

#include "console/progress.hpp"

namespace kvzap::driver {

struct MakeTasksOptions {
  std::string kind;  // "ruler" or "recall"
  std::string model;
  bool raw = false;

  std::vector<std::string> lengths;  // as given: numbers separated by commas
  std::vector<std::string> tasks;    // names separated by commas; empty: all
  std::int64_t per_task = 50;
  std::uint64_t seed = 0;
  std::string haystack;
  std::vector<std::string> questions;  // files

  std::string output;
  bool quiet = false;
  ProgressStyle progress = ProgressStyle::automatic;
  std::string config;
};

/// Declares every option of the command on `app`; parsing fills `options`.
void declare(CLI::App& app, MakeTasksOptions& options);

/// Throws UsageError that names the flag for options that are missing, out of range or contradict
/// one another.
void check_options(const MakeTasksOptions& options);

/// Runs the command. Rank 0 alone does the work. Returns the exit status: 128 + the number of a
/// signal that ended it, and left no file. Throws AgreedError, equal on every rank, for errors in
/// the input.
int make_tasks(const MakeTasksOptions& options, const Communicator& comm);

}  // namespace kvzap::driver
