// The generator of a run: its model's weights, its cache, and what its policy learns from texts.
#pragma once

#include <kvzap/core/communicator.hpp>
#include <kvzap/engine/generate.hpp>
#include <memory>

#include "commands/run/report.hpp"
#include "commands/support/model_loading.hpp"
#include "commands/support/policy_setup.hpp"
#include "options/options.hpp"

namespace kvzap::driver {

/// Loads this rank's share of the weights as values of options.dtype, and makes a generator with
/// the cache that report.cache_options describes. Its policy learns from `texts`. Adds times and
/// bytes to the report. Collective. Throws AgreedError.
std::unique_ptr<Generator> make_generator(const RunOptions& options, const Texts& texts,
                                          const ModelSetup& setup, const Communicator& comm,
                                          const ProgressCallback& progress, RunReport& report);

/// Warns on standard error if --lookup is above 0 and has no effect (Engine::why_no_drafts).
void warn_of_lookup(const Engine& engine, std::int64_t lookup, bool talks);

}  // namespace kvzap::driver
