// `kvzap train`: a linear or MLP surrogate from what `kvzap collect` has gathered.
#pragma once

#include <CLI/CLI.hpp>
#include <kvzap/communicator.hpp>
#include <string>

namespace kvzap::driver {

struct TrainOptions {
  std::string config;
};

/// Declares every option of the command on `app`; parsing fills `options`.
void declare(CLI::App& app, TrainOptions& options);

/// Carries out the command on all ranks. Throws AgreedError, on every rank alike, for whatever is
/// wrong with the input; any other exception is one rank's own.
void train(const TrainOptions& options, const Communicator& comm, const std::string& version);

}  // namespace kvzap::driver
