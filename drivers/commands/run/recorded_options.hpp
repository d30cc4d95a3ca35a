// The options of a run as its snapshots record them.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "options/options.hpp"

namespace kvzap::driver {

/// The flags that name the policy. They are compared by the policy's identity, not by their text.
inline constexpr const char* policy_flags[] = {"policy", "surrogate", "layerwise"};
bool names_policy(const std::string& name);

bool is_flag(const CLI::Option& option);
/// Returns the first long name, without dashes; empty if there is none.
std::string long_name(const CLI::Option& option);
/// Returns the option's value as text, or its default; empty if it has neither.
std::string option_text(const CLI::Option& option);

/// Returns the options that shape a run, as JSON: {"long flag": value}, without options for inputs,
/// outputs and the machine. `app` is `kvzap run`, parsed into `options`.
std::string recorded_options(const CLI::App& app, const RunOptions& options);

/// Returns every option of a run, as JSON: {"long flag": value in force, or null}. `app` is `kvzap
/// run`, parsed into `options`.
std::string options_in_force(const CLI::App& app, const RunOptions& options);

}  // namespace kvzap::driver
