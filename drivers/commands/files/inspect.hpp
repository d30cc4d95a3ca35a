// `kvzap inspect`: shows the contents of a snapshot and the tokens that its policy kept, or a
// model.
#pragma once

#include <CLI/CLI.hpp>
#include <kvzap/core/communicator.hpp>
#include <string>

#include "commands/files/snapshot_view.hpp"

namespace kvzap::driver {

struct InspectOptions {
  std::string file;
  bool verify = false;
  ViewOptions view;
};

/// Declares every option of the command on `app`; parsing fills `options`.
void declare(CLI::App& app, InspectOptions& options);

/// Runs the command. Rank 0 alone does the work, with one head's rows (and one layer's scores) in
/// memory at a time. Throws AgreedError, equal on every rank, for errors in the input, and if
/// --verify finds damage.
void inspect(const InspectOptions& options, const Communicator& comm, const std::string& version);

}  // namespace kvzap::driver
