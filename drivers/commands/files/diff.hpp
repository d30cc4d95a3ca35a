// `kvzap diff`: the differences between the rows that two policies kept of the same text.
#pragma once

#include <CLI/CLI.hpp>
#include <kvzap/core/communicator.hpp>
#include <string>

#include "commands/files/snapshot_view.hpp"

namespace kvzap::driver {

struct DiffOptions {
  std::string first, second;
  ViewOptions view;
};

/// Declares every option of the command on `app`; parsing fills `options`.
void declare(CLI::App& app, DiffOptions& options);

/// Runs the command. Rank 0 alone does the work, with one head's rows of both snapshots in memory
/// at a time. Throws AgreedError, equal on every rank, for snapshots that cannot be compared.
void diff(const DiffOptions& options, const Communicator& comm, const std::string& version);

}  // namespace kvzap::driver
