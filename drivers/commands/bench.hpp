// `kvzap bench`: speed and memory of prefill and decode at given context lengths and evict ratios.
#pragma once

#include <kvzap/core/communicator.hpp>
#include <string>

#include "options/bench_options.hpp"

namespace kvzap::driver {

/// Carries out the command on all ranks. Throws AgreedError, on every rank alike, for whatever is
/// wrong with the input; any other exception is one rank's own. Returns the exit status: 0, or 128
/// + the number of the signal that has ended it, with the rows that it had.
int bench(const BenchOptions& given, const Communicator& comm, const std::string& version,
          const std::string& revision);

}  // namespace kvzap::driver
