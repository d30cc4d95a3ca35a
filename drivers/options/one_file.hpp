#pragma once

#include <string>

namespace kvzap::driver {

/// Returns whether two names belong to one file: through "..", symbolic links (even to a file that
/// does not exist yet) or hard links. "-" is not a file, and equals only itself.
bool name_one_file(const std::string& a, const std::string& b);

}  // namespace kvzap::driver
