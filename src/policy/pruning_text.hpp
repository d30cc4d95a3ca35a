// Texts of policies, "name:key=value,key=value+modifier", before they are parsed.
#pragma once

#include <kvzap/engine/policies.hpp>
#include <map>
#include <string>
#include <vector>

namespace kvzap::policy {

/// The policy at the start of a text. Its arguments need not be valid.
struct Outline {
  std::string name;
  const PolicyInfo* info = nullptr;  // null: no policy has this name
  std::map<std::string, std::string> arguments;
  bool has_modifiers = false;

  bool has(const std::string& argument) const { return arguments.count(argument) > 0; }
};
Outline outline(const std::string& text);

/// Returns the names of the settings after an at sign: "surrogate", "threshold", …
const std::vector<std::string>& setting_names();

/// Returns the text with a further argument, "key=value", for the policy itself.
std::string with_argument(std::string text, const std::string& argument);

/// Returns the policy that Pruning::surrogate selects.
const PolicyInfo& with_surrogate();

}  // namespace kvzap::policy
