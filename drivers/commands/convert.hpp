// `kvzap convert`: a GGUF file of a folder, or a folder of a GGUF file.
#pragma once

#include <CLI/CLI.hpp>
#include <kvzap/core/communicator.hpp>
#include <string>

namespace kvzap::driver {

struct ConvertOptions {
  std::string model;
  std::string output;
  bool quiet = false;
};

/// Declares every option of the command on `app`; parsing fills `options`.
void declare(CLI::App& app, ConvertOptions& options);

/// Throws UsageError that names the flag for options that are missing, out of range or contradict
/// one another.
void check_options(const ConvertOptions& options);

/// Runs the command. Rank 0 alone does the work. Throws AgreedError, equal on every rank.
void convert(const ConvertOptions& options, const Communicator& comm);

}  // namespace kvzap::driver
