// The options of `kvzap eval`: their checks, and the settings that they ask for.
#pragma once

#include <vector>

#include "commands/eval.hpp"
#include "eval/settings.hpp"

namespace kvzap::driver {

/// Throws Error, naming the flag, for options that are out of range or contradict one another.
void validate_eval(const EvalOptions& options);

/// Returns all settings of the options. Throws Error as parse_settings does.
std::vector<eval::EvalSetting> settings_of(const EvalOptions& options);

}  // namespace kvzap::driver
