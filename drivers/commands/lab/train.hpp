// `kvzap train`: trains a linear or MLP surrogate from the pairs of `kvzap collect`.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <kvzap/core/communicator.hpp>
#include <optional>
#include <string>

#include "console/progress.hpp"

namespace kvzap::driver {

struct TrainOptions {
  std::string kind;   // linear or mlp
  std::string pairs;  // a file of pairs
  std::string output;
  std::optional<std::int64_t> threads;
  std::optional<std::int64_t> hidden;
  int epochs = 15;
  double learning_rate = 5e-3;
  std::int64_t batch = 512;
  double ridge = 1;
  double validation = 0.05;
  std::uint64_t seed = 0;
  std::string dtype = "f32";
  std::string model_name;
  bool resume = false;
  bool overwrite = false;
  std::string json;
  std::string plot;
  bool quiet = false;
  ProgressStyle progress = ProgressStyle::automatic;
  std::string config;
};

/// Declares every option of the command on `app`; parsing fills `options`.
void declare(CLI::App& app, TrainOptions& options);

/// Throws UsageError that names the flag for options that are missing, out of range or contradict
/// one another.
void check_options(const TrainOptions& options);

/// Runs the command on all ranks. Returns the exit status: 0, or 128 + the number of the signal
/// that ended training early (stop_signals), after a checkpoint was written. Throws
/// AgreedError, equal on every rank, for errors in the input. Any other exception belongs to one
/// rank.
int train(const TrainOptions& options, const Communicator& comm, const std::string& version);

}  // namespace kvzap::driver
