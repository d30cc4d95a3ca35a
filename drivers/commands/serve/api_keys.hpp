// The keys of a server's clients.
#pragma once

#include <string>
#include <vector>

namespace kvzap::driver {

/// Returns the keys in a file, one a line; none if `file` is empty. Warns of a file that other
/// users may read. Throws Error.
std::vector<std::string> read_keys(const std::string& file);
/// Returns the key in the environment variable KVZAP_API_KEY, or "". Throws Error.
std::string key_in_environment();

}  // namespace kvzap::driver
