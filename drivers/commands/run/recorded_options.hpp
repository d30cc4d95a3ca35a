// The options of a run as its snapshots record them, and the identity of its policy.
#pragma once

#include <CLI/CLI.hpp>
#include <kvzap/engine/pruning.hpp>
#include <kvzap/engine/snapshot.hpp>
#include <string>

#include "options/options.hpp"

namespace kvzap::driver {

/// Returns whether snapshots record this option. They omit inputs, outputs and the machine's
/// settings.
bool is_recorded(const std::string& name);
/// Returns whether a run may resume with another value of this option, because the cache's rows do
/// not depend on it.
bool may_change(const std::string& name);
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

/// Returns policy and arguments, with hashes in place of file names; empty if nothing is pruned.
/// Reads those files. Throws Error as parse_policy does.
std::string identity_of_policy(const Pruning& pruning);

/// Attributes of a snapshot that name the surrogate which scored its rows.
inline constexpr const char* surrogate_folder_attribute = "surrogate_folder";
inline constexpr const char* surrogate_hash_attribute = "surrogate_hash";

/// Returns the text of an attribute in info.further; empty if the snapshot has none.
std::string further_text(const SnapshotInfo& info, const char* name);

/// The surrogate of a run, given by any option.
struct SurrogateIdentity {
  std::string folder;  // absolute; empty without a surrogate
  std::string hash;    // as in identity_of_policy
};
/// Reads the folder's files. Throws Error as parse_policy does.
SurrogateIdentity identity_of_surrogate(const Pruning& pruning);

}  // namespace kvzap::driver
