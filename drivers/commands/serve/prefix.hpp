// `kvzap prefix`: lists, adds and removes the stored states of documents (--prefix-store).
#pragma once

#include <CLI/CLI.hpp>
#include <kvzap/core/communicator.hpp>
#include <optional>
#include <string>
#include <vector>

#include "commands/serve/serve.hpp"

namespace kvzap::driver {

/// With the options of a server for `add`, which prefills documents as a server does.
struct PrefixOptions : ServeOptions {
  std::string action;            // list, add or remove
  std::vector<std::string> ids;  // to remove
  std::vector<std::string> files;
  std::optional<std::string> system;
  bool removes_all = false;
  bool as_json = false;
};

void declare(CLI::App& app, PrefixOptions& options);
/// Throws UsageError. `app` has parsed the options.
void check_options(const PrefixOptions& options, const CLI::App& app);
/// Runs the command. Collective. Returns the exit status: 1 if a document could not be stored or an
/// id does not exist. Throws AgreedError.
int prefix(PrefixOptions& options, const Communicator& comm);

}  // namespace kvzap::driver
