// `kvzap chat`: a conversation over one pruned cache.
#pragma once

#include <CLI/CLI.hpp>
#include <kvzap/core/communicator.hpp>
#include <string>

#include "options/options.hpp"

namespace kvzap::driver {

/// Declares the options of `kvzap chat`: the options of `kvzap run` that apply to a conversation,
/// with defaults of its own.
void declare_chat(CLI::App& app, RunOptions& options);

/// Chooses --prune for a conversation. Throws UsageError for a file or a budget that needs a
/// context. `resumes`: a snapshot has the context.
void settle_chat(RunOptions& options, bool resumes);

/// Runs the command on all ranks. Rank 0 reads messages and commands from standard input. Answers
/// are written to standard output, everything else to standard error. `app`: parsed into `options`.
/// Returns the exit status as run does.
int chat(CLI::App& app, RunOptions& options, const Communicator& comm, const std::string& version,
         const std::string& revision);

}  // namespace kvzap::driver
