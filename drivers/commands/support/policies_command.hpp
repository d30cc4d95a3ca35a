// `kvzap policies`: lists the values of --policy, from the library's own tables.
#pragma once

#include <kvzap/engine/policies.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace kvzap::driver {

/// Returns the names of all policies and all modifiers.
std::vector<std::string> policy_names();
std::vector<std::string> modifier_names();

/// A CLI11 check that refuses unknown names. The message has the nearest name.
std::string known_policy(const std::string& name);

/// Describes the policy or modifier `name` in detail. Without a name, describes all of them in a
/// few lines each.
std::string policies_text(const std::string& name);
/// Returns the same as JSON.
nlohmann::ordered_json policies_json(const std::string& name);

/// Returns "window=64, kernel=5": parameters with their default values.
std::string parameters_text(const std::vector<PolicyParameter>& parameters);

}  // namespace kvzap::driver
