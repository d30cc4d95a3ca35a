// Loading of a model's weights, and checks of its files.
#pragma once

#include <filesystem>
#include <string>

#include "commands/setup.hpp"
#include "session/model_files.hpp"
#include "session/model_setup.hpp"

namespace kvzap::driver {

using session::hash_of_model;
using session::hash_of_policy_file;
using session::hashes_of_model;
using session::load_model;
using session::ModelHashes;
using session::with_value_type;

/// Throws Error if the model lacks required files: *.safetensors and tokenizer.json. The message
/// names the options that work without them.
void check_parts(const std::filesystem::path& model, bool needs_weights, bool needs_tokenizer);

}  // namespace kvzap::driver
