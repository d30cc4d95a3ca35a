// `kvzap chat`: a conversation over one pruned cache.
#pragma once

#include <CLI/CLI.hpp>
#include <kvzap/core/communicator.hpp>
#include <string>

#include "options/options.hpp"

namespace kvzap::driver {

/// Declares the options of `kvzap chat`: those of `kvzap run` that a conversation has a use for,
/// with defaults of its own.
void declare_chat(CLI::App& app, RunOptions& options);

/// Carries out the command on all ranks: rank 0 reads messages and commands from standard input,
/// answers go to standard output, all else to standard error. `app`: parsed into `options`. Returns
/// the exit status, as run.
int chat(CLI::App& app, RunOptions& options, const Communicator& comm, const std::string& version,
         const std::string& revision);

}  // namespace kvzap::driver
