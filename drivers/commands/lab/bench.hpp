// `kvzap bench`: speed and memory of prefill and decode at given context lengths and evict ratios.
#pragma once

#include <kvzap/core/communicator.hpp>
#include <string>

#include "options/bench_options.hpp"

namespace kvzap::driver {

/// Runs the command on all ranks. Throws AgreedError, equal on every rank, for errors in the input;
/// any other exception belongs to one rank. Returns the exit status: 0, or 128 + the number of the
/// signal that ended it after printing the finished rows.
int bench(const BenchOptions& given, const Communicator& comm, const std::string& version,
          const std::string& revision);

}  // namespace kvzap::driver
