// Errors for a folder that holds no model or surrogate.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace kvzap::model {

/// Throws Error if `folder` is not a folder with a config.json. The message names the case: a name
/// of the Hugging Face hub (with the command that downloads it), a GGUF file, another file, or a
/// folder without config.json. `expected`: the kind of folder, for the message.
void check_folder(const std::filesystem::path& folder, std::string_view expected);

/// Does the same for a model, which may also be a GGUF file.
void check_model(const std::filesystem::path& model);

}  // namespace kvzap::model
