// `kvzap models`: lists the models that kvzap reads, from the library's own tables.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace kvzap::driver {

/// Lists architectures, files, types of weights, tokenizers, chat templates and RoPE scaling, each
/// with how it was tested.
std::string models_text();
/// Returns the same as JSON.
nlohmann::ordered_json models_json();

}  // namespace kvzap::driver
