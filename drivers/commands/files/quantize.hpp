// `kvzap quantize`: a GGUF file with weights in blocks, made from a folder or another GGUF file.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <kvzap/core/communicator.hpp>
#include <optional>
#include <string>

#include "console/progress.hpp"

namespace kvzap::driver {

struct QuantizeOptions {
  std::string model;
  std::string output;
  std::string type = "Q4_K_M";
  std::optional<std::int64_t> threads;
  std::string json;
  ProgressStyle progress = ProgressStyle::automatic;
  bool quiet = false;
};

/// Declares every option of the command on `app`; parsing fills `options`.
void declare(CLI::App& app, QuantizeOptions& options);

/// Throws UsageError that names the flag for options that are missing, out of range or contradict
/// one another.
void check_options(const QuantizeOptions& options);

/// Runs the command. Rank 0 alone does the work. Returns the exit status. Throws AgreedError, equal
/// on every rank.
int quantize(const QuantizeOptions& options, const Communicator& comm);

}  // namespace kvzap::driver
