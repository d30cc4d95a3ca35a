// The options of `kvzap eval`: their checks, and the settings that they ask for.
#pragma once

#include <cstddef>
#include <kvzap/engine/comparison.hpp>
#include <string>
#include <vector>

#include "commands/lab/eval.hpp"
#include "eval/settings.hpp"

namespace kvzap::driver {

/// Returns all settings of the options. `own`: policies of the caller's own. Throws Error as
/// parse_settings does, and for a setting that breaks a rule of find_fault.
std::vector<eval::EvalSetting> settings_of(const EvalOptions& options,
                                           const eval::OwnPolicies& own = {});

/// Looks up the thresholds of settings that looks_up_threshold, as `kvzap run` does. Leaves out the
/// evict ratios of --evict-ratios that a surrogate's table does not cover. Returns warnings, on
/// rank 0. Collective. Throws AgreedError that names the setting, and if the tables cover none of
/// --evict-ratios.
std::vector<std::string> look_up_thresholds(std::vector<eval::EvalSetting>& settings,
                                            const EvalOptions& options, const Communicator& comm);

/// Returns the type of a setting's rows: its own, or that of --kv-type.
std::string name_of_kv_type(const eval::EvalSetting& setting, const EvalOptions& options);

/// Prints how many prompts and settings there are, and which settings share a prefill. `prunings`:
/// of each setting.
void print_plan(std::size_t prompts, std::size_t done,
                const std::vector<eval::EvalSetting>& settings,
                const std::vector<LoadedPruning>& prunings, const EvalOptions& options);

}  // namespace kvzap::driver
