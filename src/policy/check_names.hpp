// Checks of a policy's text before its model and its files are known.
#pragma once

#include <string>

namespace kvzap::policy {

/// Checks the names of a policy's text, and the values of its parameters. Unlike parse_policy it
/// accepts an empty text, parameters that are missing, and files that do not exist. Throws Error as
/// parse_policy does.
void check_names(const std::string& text);

}  // namespace kvzap::policy
