// The options of `kvzap eval`: their checks, the settings that they ask for, and the run of each.
#pragma once

#include <vector>

#include "commands/eval.hpp"
#include "eval/settings.hpp"
#include "options/options.hpp"

namespace kvzap::driver {

/// Throws Error, naming the flag, for options that are out of range or contradict one another.
void validate_eval(const EvalOptions& options);

/// All settings of the options. Throws Error as parse_settings does.
std::vector<detail::EvalSetting> settings_of(const EvalOptions& options);

/// The options of the engine for a setting.
EngineOptions engine_options(const EvalOptions& options, const detail::EvalSetting& setting);

}  // namespace kvzap::driver
