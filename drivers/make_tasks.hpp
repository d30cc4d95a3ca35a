// `kvzap make-tasks`: prompts with known answers, of any length.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <kvzap/communicator.hpp>
#include <string>
#include <vector>

namespace kvzap::driver {

struct MakeTasksOptions {
  std::string model;
  std::string config;
};

/// Declares every option of the command on `app`; parsing fills `options`.
void declare(CLI::App& app, MakeTasksOptions& options);

/// Rank 0 alone does the work. Throws AgreedError, on every rank alike.
void make_tasks(const MakeTasksOptions& options, const Communicator& comm,
                const std::string& version);

}  // namespace kvzap::driver
