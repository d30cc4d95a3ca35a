// `kvzap policies`: the values of --policy, from the library's own lists.
#pragma once

#include <kvzap/engine/policies.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace kvzap::driver {

/// Names of all policies, and of all modifiers.
std::vector<std::string> policy_names();
std::vector<std::string> modifier_names();

/// A CLI11 check that refuses names of neither; the message has the nearest name.
std::string known_policy(const std::string& name);

/// Returns all of them in a few lines each, or the one called `name` in detail; empty: all.
std::string policies_text(const std::string& name);
/// Returns the same as JSON.
nlohmann::ordered_json policies_json(const std::string& name);

/// Returns "window=64, kernel=5": parameters with their default values.
std::string parameters_text(const std::vector<PolicyParameter>& parameters);

}  // namespace kvzap::driver
