// `kvzap calibrate`: thresholds at which a surrogate reaches given evict ratios.
#pragma once

#include <CLI/CLI.hpp>
#include <kvzap/communicator.hpp>
#include <string>

namespace kvzap::driver {

struct CalibrateOptions {
  std::string config;
};

/// Declares every option of the command on `app`; parsing fills `options`.
void declare(CLI::App& app, CalibrateOptions& options);

/// Carries out the command on all ranks. Throws AgreedError, on every rank alike, for whatever is
/// wrong with the input; any other exception is one rank's own.
void calibrate(const CalibrateOptions& options, const Communicator& comm,
               const std::string& version);

}  // namespace kvzap::driver
