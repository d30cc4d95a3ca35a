// The checks of a command's options, before any work.
#pragma once

#include <kvzap/core/communicator.hpp>
#include <string>

#include "commands/command_line.hpp"

namespace kvzap::driver {

/// Throws AgreedUsageError that names the flag if the options of the given command are out of
/// range, missing, or exclude each other. Reads no model: what depends on one is checked later. Of
/// a resumed run the options are in its snapshot, so that `run` and `chat` check them. Collective.
void check_options(const CommandLine& line, const Communicator& comm);

/// Replaces --seed -1 by a random seed, the same on all ranks. Returns a note that names the seed,
/// or "". Collective.
std::string draw_seed(const CommandLine& line, const Communicator& comm);

/// Returns whether the command has been given --quiet.
bool is_quiet(const CommandLine& line);

}  // namespace kvzap::driver
