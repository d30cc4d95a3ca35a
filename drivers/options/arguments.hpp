// Parsing of the command line on one rank, and the check that all ranks have the same one.
#pragma once

#include <kvzap/core/communicator.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "commands/support/command_line.hpp"

namespace kvzap::driver {

/// The result of parsing the command line.
struct Reading {
  /// Flags for Kokkos.
  std::vector<std::string> kokkos;
  /// True for --help, --version and errors: there is nothing to run.
  bool ends = false;
  int status = 0;
  std::string out;    // for standard output
  std::string error;  // one line, without "kvzap: error: "
  /// About flags that are ignored, for standard error.
  std::vector<std::string> notes;
};

/// Returns whether the option of this long name, of type FILE, names a file to write.
bool is_output(std::string_view name);

/// Fills `line` from the arguments after the program's name. Converts CLI11's errors; never throws
/// them.
Reading read_arguments(CommandLine& line, const std::vector<std::string>& arguments);

/// Combines the results of all ranks: the same text on all of them, and an error if one rank has
/// one or a different request. Collective.
void agree_on_reading(Reading& reading, const Communicator& comm);

/// Reads the deck of the given command. Also checks that no option names a file that another option
/// writes, even by another name. Collective; throws AgreedUsageError.
void read_deck_of_command(CommandLine& line, const Communicator& comm);

/// Throws AgreedUsageError that names the first option that differs between ranks. Such ranks would
/// wait for one another forever, or mix up their results. Collective.
void check_same_on_ranks(const CommandLine& line, const Communicator& comm);

}  // namespace kvzap::driver
