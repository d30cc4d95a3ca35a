// `kvzap run`: a checkpoint, a prompt, a pruned cache, an answer.
#pragma once

#include <kvzap/communicator.hpp>
#include <memory>
#include <string>

#include "options.hpp"

namespace kvzap::driver {

struct ResumedRun;

/// Carries out the command on all ranks. `recorded`: of recorded_options; `resumed`: of
/// open_resumed. Returns the exit status, 128 + the number of the signal that has ended the run
/// early, its snapshot written. Throws AgreedError, on every rank alike, for whatever is wrong with
/// the input; any other exception is one rank's own.
int run(const RunOptions& options, std::string recorded, std::unique_ptr<ResumedRun> resumed,
        const Communicator& comm, const std::string& version);

}  // namespace kvzap::driver
