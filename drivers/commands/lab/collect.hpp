// `kvzap collect`: runs texts through a model to collect hidden states and oracle scores, from
// which surrogates are trained, or statistics of queries.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <kvzap/core/communicator.hpp>
#include <kvzap/lab/collect.hpp>
#include <optional>
#include <string>

#include "console/progress.hpp"
#include "options/rope_options.hpp"

namespace kvzap::driver {

struct CollectOptions {
  std::string model;
  std::string texts;
  std::string output;
  std::string query_statistics;  // the file of statistics that replaces pairs
  std::int64_t sink = 4;
  std::string dtype = "bf16";
  std::string weights = "stored";
  std::optional<std::uint64_t> random_weights;
  std::optional<std::int64_t> threads;
  RopeOptions rope;
  std::optional<std::int64_t> layers;  // absent: all
  CollectRules rules;
  int compression = 1;
  std::string json;
  bool quiet = false;
  ProgressStyle progress = ProgressStyle::automatic;
  std::string config;
  /// Returns whether the command line or the deck has this option. Set by `declare`.
  std::function<bool(const std::string& option)> is_given;
};

/// Declares every option of the command on `app`, which must live as long as `options`; parsing
/// fills `options`.
void declare(CLI::App& app, CollectOptions& options);

/// Throws UsageError that names the flag for options that are missing, out of range or contradict
/// one another.
void check_options(const CollectOptions& options);

/// Runs the command on all ranks. Returns the exit status: 0, or 128 + the number of the signal
/// that ended it after a text. Throws AgreedError, equal on every rank, for errors in the input.
/// Any other exception belongs to one rank.
int collect(const CollectOptions& options, const Communicator& comm, const std::string& version);

}  // namespace kvzap::driver
