// `kvzap eval`: accuracy against evict ratio, for any number of policies, on prompts with known
// answers.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <kvzap/communicator.hpp>
#include <kvzap/sampler.hpp>
#include <optional>
#include <string>
#include <vector>

namespace kvzap::driver {

struct EvalOptions {
  std::string model;
  std::string config;
};

/// Declares every option of the command on `app`; parsing fills `options`.
void declare(CLI::App& app, EvalOptions& options);

/// Carries out the command on all ranks. Returns the exit status: 0, or 128 + the number of the
/// signal that ended it early, after the prompt under way was written. Throws AgreedError, on every
/// rank alike, for whatever is wrong with the input; any other exception is one rank's own.
int evaluate(const EvalOptions& options, const Communicator& comm, const std::string& version);

}  // namespace kvzap::driver
