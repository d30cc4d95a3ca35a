// Documents about the program, made from its own table of options so that they are never out of
// date.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace kvzap::driver {

/// Returns the man page kvzap(1) in the man macros of roff.
std::string man_page(const CLI::App& app, const std::string& version);
/// Returns a script that completes commands, options, and the values of options with a known set of
/// values. It also works after mpirun, mpiexec and srun.
std::string bash_completion(const CLI::App& app);
std::string zsh_completion(const CLI::App& app);
std::string fish_completion(const CLI::App& app);

}  // namespace kvzap::driver
