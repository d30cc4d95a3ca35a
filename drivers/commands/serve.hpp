// `kvzap serve`: many users on one pruned cache.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <kvzap/core/communicator.hpp>
#include <optional>
#include <string>

#include "options/options.hpp"
#include "server/scheduler.hpp"

namespace kvzap::driver {

struct ServeOptions {
  /// Of `kvzap run`, what is not about one prompt.
  RunOptions run;
  std::string host = "127.0.0.1";
  int port = 8080;
  std::string api_key_file;
  std::string alias;      // empty: the folder's name
  std::string kv_memory;  // empty: what there is
  server::SchedulerOptions scheduling;
  std::optional<std::uint64_t> seed;
  double drain_seconds = 30;
  bool log_prompts = false;
};

void declare_serve(CLI::App& app, ServeOptions& options);

/// Carries out the command on all ranks: rank 0 listens, the others follow. Returns the exit
/// status: 0 when a signal has asked for the end and all requests were answered, 128 + the signal's
/// number when some were not. Throws AgreedError, on every rank alike, for what is wrong with the
/// options.
int serve(ServeOptions& options, const Communicator& comm);

}  // namespace kvzap::driver
