// Texts of policies, "name:key=value,key=value+modifier", before they are parsed.
#pragma once

#include <algorithm>
#include <string>

namespace kvzap::policy {

/// Returns the name at the start of "name:key=value+modifier".
inline std::string name_in(const std::string& policy) {
  return policy.substr(0, policy.find_first_of(":+"));
}

/// Returns the text with a further argument, "key=value", for the policy itself.
inline std::string with_argument(std::string policy, const std::string& argument) {
  const std::size_t name = name_in(policy).size();
  const bool has_arguments = policy.compare(name, 1, ":") == 0;
  policy.replace(name, has_arguments ? 1 : 0, ":" + argument + (has_arguments ? "," : ""));
  return policy;
}

/// Returns whether the policy itself (not a modifier) has this argument.
inline bool has_argument(const std::string& policy, const std::string& key) {
  const std::string own = policy.substr(0, policy.find('+'));
  return own.find(":" + key + "=") != std::string::npos ||
         own.find("," + key + "=") != std::string::npos;
}

}  // namespace kvzap::policy
