// `kvzap policies`: what --policy takes, told by the library's own lists.
#pragma once

#include <kvzap/engine/policies.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace kvzap::driver {

/// Names of all policies, and of all modifiers.
std::vector<std::string> policy_names();
std::vector<std::string> modifier_names();

/// Refuses what is neither, as a CLI11 check; names the nearest one.
std::string known_policy(const std::string& name);

/// All of them in a few lines each, or the one called `name` in full; empty: all.
std::string policies_text(const std::string& name);
/// The same for machines.
nlohmann::ordered_json policies_json(const std::string& name);

/// "window=64, kernel=5": parameters with the values that they have if none is given.
std::string parameters_text(const std::vector<PolicyParameter>& parameters);

}  // namespace kvzap::driver
