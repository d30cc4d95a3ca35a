// `kvzap serve`: one pruned cache for many users.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <kvzap/core/communicator.hpp>
#include <kvzap/server/prefix_store.hpp>
#include <kvzap/server/protocol.hpp>
#include <kvzap/server/scheduler.hpp>
#include <optional>
#include <string>
#include <vector>

#include "options/options.hpp"

namespace kvzap::driver {

struct ServeOptions : EngineOptions {
  SamplingOptions sampling;
  SamplingFlags sampling_flags;
  std::string host = "127.0.0.1";
  int port = 8080;
  std::string api_key_file;
  std::string alias;          // empty: the folder's name
  std::string kv_memory;      // empty: four fifths of the free memory
  std::string prefix_memory;  // empty: see Serving::prefix_limit
  std::string response_memory = "64MiB";
  std::vector<std::string> allowed_hosts;
  server::SchedulerOptions scheduling;
  std::optional<std::uint64_t> seed;
  std::string request_policies = "on";
  double drain_seconds = 30;
  bool log_prompts = false;
  std::string log_format = "text";
  std::vector<std::string> allowed_origins;
  std::string prefix_store;  // folder; empty: none
  std::string prefix_store_size = "20GB";
  std::string pooling = "last";            // of vectors of texts
  std::int64_t least_stored_tokens = 256;  // see PrefixStore::Options
};

void declare_serve(CLI::App& app, ServeOptions& options);

/// Throws UsageError that names the flag for options that are missing, out of range or contradict
/// one another. Call resolve_pruning first.
void check_options(const ServeOptions& options);

/// Runs the command on all ranks: rank 0 listens, the others follow. Collective. Returns the exit
/// status: 0 if a signal ended the server and all requests were answered, 128 + the signal's number
/// if some were cut off. Throws AgreedError on every rank for invalid options. `version` and
/// `revision`: of kvzap, for the metrics.
int serve(ServeOptions& options, const Communicator& comm, const std::string& version,
          const std::string& revision);

/// Requests in place of those of clients. Rank 0 calls the functions.
struct OwnRequests {
  /// Makes the requests. Throws Error.
  std::function<std::vector<server::GenerationRequest>(const server::ServedModel&)> make;
  /// The result of a request: its error, and the id of the stored state of its prompt, if any.
  struct Result {
    std::string error, id;
  };
  /// Is called once all are answered. Returns the exit status.
  std::function<int(const std::vector<Result>&)> finish;
};
/// Runs a server with --prefix-store, but without HTTP, until the requests are answered and their
/// states stored. Collective. Returns the exit status. Throws as `serve` does.
int answer_own(ServeOptions& options, const OwnRequests& requests, const Communicator& comm);

/// Declares --prefix-store and --prefix-store-size.
void declare_prefix_store(CLI::App& app, ServeOptions& options, const std::string& group);

}  // namespace kvzap::driver
