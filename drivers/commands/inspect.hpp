// `kvzap inspect`: what a snapshot holds, and what its policy kept of the text.
#pragma once

#include <CLI/CLI.hpp>
#include <kvzap/core/communicator.hpp>
#include <string>

#include "commands/snapshot_view.hpp"

namespace kvzap::driver {

struct InspectOptions {
  std::string file;
  bool verify = false;
  ViewOptions view;
};

/// Declares every option of the command on `app`; parsing fills `options`.
void declare(CLI::App& app, InspectOptions& options);

/// Rank 0 alone does the work, and has one head's rows in memory at a time (with one layer's
/// scores). Throws AgreedError, on every rank alike, for whatever is wrong with the input, and if
/// --verify finds damage.
void inspect(const InspectOptions& options, const Communicator& comm, const std::string& version);

}  // namespace kvzap::driver
