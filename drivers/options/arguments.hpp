// The command line of one rank, and that all ranks have the same one.
#pragma once

#include <kvzap/core/communicator.hpp>
#include <string>
#include <vector>

#include "commands/command_line.hpp"

namespace kvzap::driver {

/// What reading the command line has come to.
struct Reading {
  /// Flags for Kokkos.
  std::vector<std::string> kokkos;
  /// Nothing is to be run: --help, --version, or an error.
  bool ends = false;
  int status = 0;
  std::string out;    // for standard output
  std::string error;  // one line, without "kvzap: error: "
};

/// Fills `line` from the arguments behind the program's name. Never throws CLI11's errors.
Reading read_arguments(CommandLine& line, const std::vector<std::string>& arguments);

/// What all ranks' readings come to: the same text on all of them, an error if one rank has one or
/// asks for another thing. Collective.
void agree_on_reading(Reading& reading, const Communicator& comm);

/// Reads the deck of the command that was given, and checks that its options do not name one file
/// twice where that is written, also under another name. Collective; throws AgreedError.
void read_deck_of_command(CommandLine& line, const Communicator& comm);

/// Ranks with options of their own would wait for one another for ever, or mix up what they
/// compute. Throws AgreedError that names the first option that differs. Collective.
void check_same_on_ranks(const CommandLine& line, const Communicator& comm);

}  // namespace kvzap::driver
