// `kvzap diff`: what two policies kept differently of the same text.
#pragma once

#include <CLI/CLI.hpp>
#include <kvzap/core/communicator.hpp>
#include <string>

#include "commands/snapshot_view.hpp"

namespace kvzap::driver {

struct DiffOptions {
  std::string first, second;
  ViewOptions view;
};

/// Declares every option of the command on `app`; parsing fills `options`.
void declare(CLI::App& app, DiffOptions& options);

/// Rank 0 alone does the work, and has one head's rows of both in memory at a time. Throws
/// AgreedError, on every rank alike, for snapshots that cannot be compared.
void diff(const DiffOptions& options, const Communicator& comm, const std::string& version);

}  // namespace kvzap::driver
