// RoPE scaling by the command line: --rope-scaling and --rope-scale of every command that runs a
// model.
#pragma once

#include <kvzap/model/model_config.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace kvzap::driver {

struct RopeOptions {
  std::string scaling;  // none, linear, dynamic or yarn; empty: what config.json has
  std::optional<double> scale;
};

/// Gives `config` the scaling that the options ask for, in place of its own. Throws Error naming
/// the flag, for one option without the other and a factor out of [1, 1e6].
void apply_rope(const RopeOptions& rope, ModelConfig& config);

/// What the longest context of a model is called in messages: max_position_embeddings, unless RoPE
/// scaling makes it longer.
std::string name_of_longest(const ModelConfig& config);
/// What a person may do whose text is longer than that: a clause in parentheses, with a space
/// before it.
std::string hint_for_longer(const ModelConfig& config, std::int64_t tokens);
/// The longest sequence accepted, from -c (absent: the model's), or 0: no limit. Random weights
/// have none but a sliding window. Throws Error if -c asks for more than the model can.
std::int64_t context_limit(const std::optional<std::int64_t>& max_context,
                           const ModelConfig& config, bool has_random_weights);

/// For reports: type, factor, original_max_position_embeddings, attention_factor; null without
/// scaling.
nlohmann::ordered_json rope_json(const ModelConfig& config);

}  // namespace kvzap::driver
