// `kvzap run`: a checkpoint, a prompt, a pruned cache, an answer.
#pragma once

#include <functional>
#include <kvzap/core/communicator.hpp>
#include <kvzap/engine/generate.hpp>
#include <kvzap/engine/snapshot.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <memory>
#include <string>
#include <vector>

#include "commands/report.hpp"
#include "commands/resumed_run.hpp"
#include "console/progress.hpp"
#include "options/options.hpp"

namespace kvzap::driver {

/// A run whose context is in the cache.
struct OpenRun {
  const RunOptions& options;
  Generator& generator;
  const Tokenizer* tokenizer;  // on rank 0
  std::vector<TokenId> context;
  std::vector<TokenId> stop_ids;
  std::int64_t limit;  // of tokens; 0: none
  /// Attributes of its snapshots, except run_state. On rank 0.
  SnapshotInfo info;
  RunState& state;
  RunReport& report;
  Progress& bar;
  const ProgressCallback& progress;
  const Communicator& comm;
};
/// Uses an open run. May throw Interrupted on every rank.
using Talk = std::function<void(OpenRun&)>;

/// The description of a run in its report and snapshots.
struct RunDescription {
  std::string version;
  std::string revision;  // of the sources
  std::string recorded;  // of recorded_options
  std::string flags;     // of options_in_force
};

/// Carries out the command on all ranks. `resumed`: of open_resumed; `talk`: in place of the
/// options' questions, and of the report to a person. Returns the exit status, 128 + the number of
/// the signal that has ended the run early, its snapshot written. Throws AgreedError, on every rank
/// alike, for whatever is wrong with the input; any other exception is one rank's own.
int run(const RunOptions& options, const RunDescription& description,
        std::unique_ptr<ResumedRun> resumed, const Communicator& comm, const Talk& talk = {});

}  // namespace kvzap::driver
