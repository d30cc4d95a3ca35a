// The checks of a command's options, before any work.
#pragma once

#include <kvzap/core/communicator.hpp>
#include <string>

#include "commands/support/command_line.hpp"

namespace kvzap::driver {

/// Calls Command::check of the given command. Throws AgreedUsageError. Collective.
void check_options(const CommandLine& line, const Communicator& comm);

/// Replaces --seed -1 by a random seed, the same on all ranks. Returns a note that names the seed,
/// or "". Collective.
std::string draw_seed(const CommandLine& line, const Communicator& comm);

/// Returns whether the command has been given --quiet.
bool is_quiet(const CommandLine& line);

}  // namespace kvzap::driver
