// What to tell a person whose folder of a model or a surrogate is none.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace kvzap::detail {

/// What to do about a name that is no file here and looks like one of the Hugging Face hub, with
/// ". " before it; else empty.
std::string hub_hint(const std::string& name);

/// Throws Error if `folder` is not a folder with a config.json: for a name of the Hugging Face hub
/// with the line that downloads it, for a GGUF file, a file of a folder, and a folder without
/// config.json. `expected`: what it should be.
void check_folder(const std::filesystem::path& folder, std::string_view expected);

}  // namespace kvzap::detail
