// Loading of a model's weights, and checks of its files.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "commands/support/setup.hpp"
#include "gguf/model_file.hpp"
#include "session/model_files.hpp"
#include "session/model_setup.hpp"

namespace kvzap::driver {

using session::hash_of_model;
using session::hash_of_policy_file;
using session::hashes_of_model;
using session::load_model;
using session::ModelHashes;

/// Returns the bytes of each rank's weights, for plan_memory, if weights may be quantised; else
/// nothing. `options` has the fields model, dtype, weights and random_weights. Throws Error as
/// weight_bytes does.
template <class Options>
std::vector<std::int64_t> quantised_bytes(const Options& options, const ModelConfig& config,
                                          int ranks) {
  const WeightStorage storage = weight_storage_from_name(options.weights);
  const bool is_plain =
      storage == WeightStorage::unpacked ||
      (storage == WeightStorage::as_stored &&
       (options.random_weights || !session::has_quantised_weights(options.model)));
  if (is_plain || ranks > config.num_key_value_heads) return {};
  return weight_bytes(options.model, config, dtype_from_name(options.dtype), ranks,
                      options.random_weights, storage);
}

/// Throws Error if the model lacks required files: *.safetensors and tokenizer.json. The message
/// names the options that work without them.
void check_parts(const std::filesystem::path& model, bool needs_weights, bool needs_tokenizer);

}  // namespace kvzap::driver
