// A run that resumes from a snapshot: opens the file and checks that the run's options fit it.
#pragma once

#include <CLI/CLI.hpp>
#include <kvzap/core/communicator.hpp>
#include <kvzap/engine/snapshot.hpp>
#include <memory>
#include <optional>
#include <string>

#include "options/options.hpp"
#include "session/conversation.hpp"
#include "session/recorded.hpp"

namespace kvzap::driver {

/// Opens the snapshot of options.resume, if any. Sets the options that neither command line nor
/// deck has set to the values recorded in the file. `app` is `kvzap run`, parsed into `options`.
/// Collective. Throws AgreedError for a file from which no run can resume, for given options that
/// would change its rows, and for another model, tokenizer or policy.
std::unique_ptr<session::Recorded> open_resumed(CLI::App& app, RunOptions& options,
                                                const Communicator& comm);
/// Opens a snapshot for a current run. It must have the same model and policy, and options under
/// which its rows would be the same. `app`: the command; `recorded`: the run's recorded_options;
/// `ours`: its conversation, described on rank 0. Collective. Throws AgreedError as open_resumed
/// does.
std::unique_ptr<session::Recorded> open_fitting(const CLI::App& app, const std::string& file,
                                                const std::string& recorded,
                                                const session::Conversation& ours, DType dtype,
                                                const Communicator& comm);
/// Returns what becomes of the file's keys and values in a cache of these types, if it packs them
/// or unpacks quantised ones; else nothing. `file`: its name.
std::optional<std::string> note_of_types(const std::string& file, const SnapshotHeader& header,
                                         const PageFormat& format, DType dtype);

}  // namespace kvzap::driver
