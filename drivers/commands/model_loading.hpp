// How commands load a model's weights, and tell models apart.
#pragma once

#include <filesystem>
#include <string>

#include "commands/setup.hpp"
#include "session/model_files.hpp"
#include "session/model_setup.hpp"

namespace kvzap::driver {

using detail::hash_of_model;
using detail::hash_of_policy_file;
using detail::hashes_of_model;
using detail::load_model;
using detail::ModelHashes;
using detail::with_value_type;

/// Throws Error if the folder lacks what is needed of *.safetensors and tokenizer.json, with the
/// options that do without.
void check_parts(const std::filesystem::path& folder, bool needs_weights, bool needs_tokenizer);

}  // namespace kvzap::driver
