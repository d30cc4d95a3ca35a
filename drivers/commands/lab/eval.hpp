// `kvzap eval`: accuracy against evict ratio, for any number of policies, on prompts with known
// answers.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <kvzap/core/communicator.hpp>
#include <kvzap/engine/sampler.hpp>
#include <kvzap/model/model.hpp>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "eval/settings.hpp"
#include "options/options.hpp"

namespace kvzap::driver {

/// `pruning` and its texts hold for every setting that does not say otherwise.
struct EvalOptions : EngineOptions {
  // Lists; each may be given in several parts.
  std::vector<std::string> tasks;
  std::string prompt_templates;
  std::optional<std::int64_t> max_prompts;
  std::optional<std::int64_t> per_task;
  bool keep_going = false;

  std::vector<std::string> policies;
  std::vector<std::string> evict_ratios;
  std::vector<std::string> thresholds;

  std::optional<std::int64_t> new_tokens;  // absent: the number of the task
  SamplingOptions sampling;
  int tries = 1;
  std::int64_t pass_k = 0;
  std::string parallel = "heads";
  std::int64_t batch = 0;

  std::string output;
  int bootstrap_samples = 2000;
  std::string json;
};

/// A process that runs an evaluation by itself, such as Python's. It gets progress and warnings in
/// place of the terminal, and no handler of signals is installed.
struct EvalHost {
  /// Policies of the host's own, which --policies may name.
  eval::OwnPolicies policies;
  /// A hash of each of these. A folder whose records come from other hashes is refused.
  std::map<std::string, std::string> hashes;
  /// Called with "eval", the prompts done and those in total; within a prompt, and while the model
  /// is loaded, as ProgressCallback says. An exception ends the evaluation.
  ProgressCallback progress;
  std::function<void(const std::string&)> warn;
};

/// Declares every option of the command on `app`; parsing fills `options`.
void declare(CLI::App& app, EvalOptions& options);

/// Throws UsageError that names the flag for options that are missing, out of range or contradict
/// one another. `own`: policies of the caller's own.
void check_options(const EvalOptions& options, const eval::OwnPolicies& own = {});

/// Runs the command on all ranks. Returns the exit status: 0, or 128 + the number of the signal
/// that ended it early, after the current prompt was written. Without a `host`, prints the table on
/// standard output. Throws AgreedError, equal on every rank, for errors in the input. Any other
/// exception belongs to one rank.
int evaluate(const EvalOptions& options, const Communicator& comm, const std::string& version,
             const EvalHost* host = nullptr);

}  // namespace kvzap::driver
