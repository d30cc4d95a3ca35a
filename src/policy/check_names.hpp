// Checks of a policy's text before its model and its files are known; suggestions of names.
#pragma once

#include <kvzap/engine/policy_text.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap::policy {

/// Checks the names of a policy, and the values of its parameters. Unlike parse_policy it
/// accepts an empty text, parameters that are missing, and files that do not exist. Throws Error as
/// parse_policy does.
void check_names(const PolicyText& text);

/// Returns the one of `names` that `name` means: one that it begins, or to which it adds a word, or
/// files::nearest_name. Understands the names of kvpress's classes (SnapKVPress). "": none.
std::string nearest_policy(std::string_view name, const std::vector<std::string>& names);

}  // namespace kvzap::policy
