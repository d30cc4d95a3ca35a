// `kvzap run`: answers questions about a prompt with a pruned cache.
#pragma once

#include <functional>
#include <kvzap/core/communicator.hpp>
#include <kvzap/engine/generate.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <memory>
#include <string>
#include <vector>

#include "commands/run/report.hpp"
#include "commands/run/resumed_run.hpp"
#include "console/progress.hpp"
#include "options/options.hpp"
#include "session/conversation.hpp"

namespace kvzap::driver {

/// A run whose context is in the cache.
struct OpenRun {
  const RunOptions& options;
  session::Conversation& conversation;
  const Tokenizer* tokenizer;  // on rank 0
  std::vector<TokenId> context;
  std::vector<TokenId> stop_ids;
  std::int64_t limit;  // most tokens; 0: no limit
  /// Receives the answers of earlier conversations.
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
  std::string revision;  // revision of the sources
  std::string recorded;  // see recorded_options
  std::string flags;     // see options_in_force
};

/// Runs the command on all ranks. `resumed`: the result of open_resumed. `talk` replaces the
/// options' questions, and the report to a person. Returns the exit status, 128 + the number of a
/// signal that ended the run early; a snapshot is then written. Throws AgreedError, equal on every
/// rank, for errors in the input. Any other exception belongs to one rank.
int run(const RunOptions& options, const RunDescription& description,
        std::unique_ptr<session::Recorded> resumed, const Communicator& comm,
        const Talk& talk = {});

}  // namespace kvzap::driver
