// The arguments before CLI11 reads them: help and version anywhere, flags of Kokkos and of other
// programs, other spellings, and what to type instead of a wrong command line.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace kvzap::driver {

/// Arguments with kvzap's own names for everything.
struct Sifted {
  std::vector<std::string> own;     // for CLI11
  std::vector<std::string> kokkos;  // for Kokkos
  std::vector<std::string> notes;   // about flags that are ignored
  const CLI::App* help = nullptr;   // the program or the command whose help is wanted
  bool wants_version = false;
  std::string error;  // one line; empty: none
};

/// Reads the arguments after the program's name, at least one. `app` has all commands.
Sifted sift(const CLI::App& app, const std::vector<std::string>& arguments);

}  // namespace kvzap::driver
