// Texts about the program that are made from its own table of options, so that they cannot be out
// of date.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace kvzap::driver {

/// The man page kvzap(1) in the man macros of roff.
std::string man_page(const CLI::App& app, const std::string& version);
/// Completion of commands, options, and of values where the option says what they can be; also
/// behind mpirun, mpiexec and srun.
std::string bash_completion(const CLI::App& app);
std::string zsh_completion(const CLI::App& app);
std::string fish_completion(const CLI::App& app);

}  // namespace kvzap::driver
