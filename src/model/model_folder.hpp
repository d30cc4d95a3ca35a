// What to tell a person whose folder of a model or a surrogate is none.
#pragma once

#include <filesystem>
#include <string_view>

namespace kvzap::detail {

/// Throws Error if `folder` is not a folder with a config.json: for a name of the Hugging Face hub
/// with the line that downloads it, for a GGUF file, a file of a folder, and a folder without
/// config.json. `expected`: what it should be.
void check_folder(const std::filesystem::path& folder, std::string_view expected);

}  // namespace kvzap::detail
