// RoPE scaling by the command line: --rope-scaling and --rope-scale of every command that runs a
// model.
#pragma once

#include <kvzap/model_config.hpp>
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

/// For reports: type, factor, original_max_position_embeddings, attention_factor; null without
/// scaling.
nlohmann::ordered_json rope_json(const ModelConfig& config);

}  // namespace kvzap::driver
