// The names in texts of prunings.
#pragma once

#include <kvzap/engine/policies.hpp>
#include <string>
#include <vector>

namespace kvzap::policy {

/// Returns the names of the settings after an at sign: "surrogate", "threshold", …
const std::vector<std::string>& setting_names();

/// Returns the policy that Pruning::surrogate selects.
const PolicyInfo& with_surrogate();

}  // namespace kvzap::policy
