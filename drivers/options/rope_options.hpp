// RoPE scaling on the command line: --rope-scaling and --rope-scale of every command that runs a
// model.
#pragma once

#include <kvzap/model/model_config.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace kvzap::driver {

struct RopeOptions {
  std::string scaling;  // none, linear, dynamic or yarn; empty: the scaling of config.json
  std::optional<double> scale;
};

/// Replaces the scaling of `config` by the options' scaling. Throws Error that names the flag for
/// one option without the other, and for a factor outside [1, 1e6].
void apply_rope(const RopeOptions& rope, ModelConfig& config);

/// Returns the name of the setting that limits a model's context, for messages:
/// max_position_embeddings, unless RoPE scaling extends it.
std::string name_of_longest(const ModelConfig& config);
/// Returns a hint for texts that exceed the limit: a clause in parentheses, with a space before it.
std::string hint_for_longer(const ModelConfig& config, std::int64_t tokens);
/// Returns the longest sequence accepted, from -c (absent: the model's limit), or 0 for no limit.
/// Random weights set no limit. Throws Error if -c exceeds the model's
/// limit.
std::int64_t context_limit(const std::optional<std::int64_t>& max_context,
                           const ModelConfig& config, bool has_random_weights);

/// Returns type, factor, original_max_position_embeddings and attention_factor for reports; null
/// without scaling.
nlohmann::ordered_json rope_json(const ModelConfig& config);

}  // namespace kvzap::driver
