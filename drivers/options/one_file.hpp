#pragma once

#include <string>

namespace kvzap::driver {

/// Whether two names are of one file: through "..", symbolic links (also to what is not there yet)
/// or hard links. "-" is no file, and the same as itself alone.
bool name_one_file(const std::string& a, const std::string& b);

}  // namespace kvzap::driver
