// `kvzap run`: a checkpoint, a prompt, a pruned cache, an answer.
#pragma once

#include <kvzap/communicator.hpp>
#include <memory>
#include <string>

#include "options.hpp"

namespace kvzap::driver {

struct ResumedRun;

/// What a run says of itself.
struct RunDescription {
  std::string version;
  std::string revision;  // of the sources
  std::string recorded;  // of recorded_options
  std::string flags;     // of options_in_force
};

/// Carries out the command on all ranks. `resumed`: of open_resumed. Returns the exit status, 128 +
/// the number of the signal that has ended the run early, its snapshot written. Throws AgreedError,
/// on every rank alike, for whatever is wrong with the input; any other exception is one rank's
/// own.
int run(const RunOptions& options, const RunDescription& description,
        std::unique_ptr<ResumedRun> resumed, const Communicator& comm);

}  // namespace kvzap::driver
