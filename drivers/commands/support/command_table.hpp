// The commands of the program: one row each.
#pragma once

#include <CLI/CLI.hpp>
#include <kvzap/core/communicator.hpp>
#include <string>
#include <string_view>

namespace kvzap::driver {

struct CommandLine;

/// A command. Functions that it does not have are null.
struct Command {
  const char* name;
  const char* summary;
  /// Adds its options, which parsing writes to the command line.
  void (*declare)(CLI::App& app, CommandLine& line);
  /// Throws Error that names the flag if options are out of range, missing, or exclude each other.
  /// Reads no model: what depends on one is checked later. Of a resumed run the options are in its
  /// snapshot, so that `run` and `chat` check them.
  void (*check)(const CommandLine& line);
  /// Runs it. Returns the exit status. Collective.
  int (*run)(CommandLine& line, const Communicator& comm);
  /// Returns a document about kvzap itself, in place of `run`. A build prints such documents even
  /// on a machine where neither MPI nor Kokkos can start.
  std::string (*document)(const CommandLine& line);
};

/// Adds all commands to the program, in the order of --help.
void add_commands(CLI::App& app, CommandLine& line);
/// Returns the command of this name, or null.
const Command* find_command(std::string_view name);

}  // namespace kvzap::driver
