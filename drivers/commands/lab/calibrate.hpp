// `kvzap calibrate`: thresholds at which a surrogate reaches given evict ratios.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <kvzap/core/communicator.hpp>
#include <optional>
#include <string>
#include <vector>

#include "console/progress.hpp"
#include "options/rope_options.hpp"

namespace kvzap::driver {

struct CalibrateOptions {
  std::string model;
  std::string surrogate;
  std::string dtype = "bf16";
  std::string weights = "stored";
  std::optional<std::uint64_t> random_weights;
  std::optional<std::int64_t> threads;
  RopeOptions rope;

  std::string file;
  std::optional<std::int64_t> max_texts;  // absent: all
  bool raw = false;
  std::optional<std::int64_t> max_context;  // absent: the longest context of the model

  std::vector<std::string> evict_ratios;  // as given: numbers separated by commas
  std::vector<std::string> windows;       // as given: numbers separated by commas
  std::int64_t sink = 0;
  std::vector<std::string> evaluations;  // folders of kvzap eval; empty: no recommendation

  std::string output;  // empty: thresholds.json in the surrogate's folder
  bool store = true;
  std::string json;
  bool quiet = false;
  ProgressStyle progress = ProgressStyle::automatic;
  std::string config;
  /// Returns whether the command line or the deck has this option. Set by `declare`.
  std::function<bool(const std::string& option)> is_given;
};

/// Declares every option of the command on `app`, which must live as long as `options`; parsing
/// fills `options`.
void declare(CLI::App& app, CalibrateOptions& options);

/// Throws UsageError that names the flag for options that are missing, out of range or contradict
/// one another.
void check_options(const CalibrateOptions& options);

/// Runs the command on all ranks. Throws AgreedError, equal on every rank, for errors in the input.
/// Any other exception belongs to one rank.
void calibrate(const CalibrateOptions& options, const Communicator& comm,
               const std::string& version);

}  // namespace kvzap::driver
