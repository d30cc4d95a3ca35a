// `kvzap leaderboard`: several evaluations on one page.
#pragma once

#include <CLI/CLI.hpp>
#include <kvzap/core/communicator.hpp>
#include <string>
#include <vector>

namespace kvzap::driver {

struct LeaderboardOptions {
  std::vector<std::string> evaluations;
  std::string task = "all";
  std::string output;  // empty: standard output
  std::string format;  // markdown or html; empty: chosen by the output's name
  std::string json;
  std::string config;
};

/// Declares every option of the command on `app`; parsing fills `options`.
void declare(CLI::App& app, LeaderboardOptions& options);

/// Throws UsageError that names the flag for options that are missing, out of range or contradict
/// one another.
void check_options(const LeaderboardOptions& options);

/// Runs the command. Rank 0 alone does the work. Throws AgreedError, equal on every rank.
void leaderboard(const LeaderboardOptions& options, const Communicator& comm,
                 const std::string& version);

}  // namespace kvzap::driver
