// `kvzap convert`: a GGUF file of a folder, or a folder of a GGUF file.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <kvzap/core/communicator.hpp>
#include <string>
#include <vector>

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

/// Prints warnings, one in a line.
void say_warnings(const std::vector<std::string>& warnings);

/// Runs `work`, which writes the model `output`, on rank 0. `work` calls stop_here_if_asked; a
/// signal then ends it, and nothing is left. Returns the exit status, 128 + the signal's number.
/// Prints the warnings of the model's config, and unless `quiet` a note if kvzap cannot run it.
/// Collective. Throws AgreedError.
int write_model(const std::string& model, const std::string& output, bool quiet,
                const Communicator& comm, const std::function<void()>& work);

/// Runs the command. Rank 0 alone does the work. Returns the exit status. Throws AgreedError, equal
/// on every rank.
int convert(const ConvertOptions& options, const Communicator& comm);

}  // namespace kvzap::driver
