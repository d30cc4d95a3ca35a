// `kvzap run`: a checkpoint, a prompt, a pruned cache, an answer.
#pragma once

#include <kvzap/communicator.hpp>

#include "options.hpp"

namespace kvzap::driver {

/// Carries out the command on all ranks. Throws AgreedError, on every rank alike, for whatever is
/// wrong with the input; any other exception is one rank's own.
void run(const RunOptions& given, const Communicator& comm, const std::string& version);

}  // namespace kvzap::driver
