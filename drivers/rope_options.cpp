#include "rope_options.hpp"

#include <fmt/format.h>

#include "options.hpp"

namespace kvzap::driver {

void apply_rope(const RopeOptions& rope, ModelConfig& config) {
  const bool scales = !rope.scaling.empty() && rope.scaling != "none";
  require(scales || !rope.scale,
          fmt::format("--rope-scale needs --rope-scaling linear, dynamic or yarn{}",
                      rope.scaling.empty() ? "" : "; it is none"));
  require(!scales || rope.scale,
          fmt::format("--rope-scaling {} needs --rope-scale, how many times longer texts may get",
                      rope.scaling));
  if (rope.scaling == "none") config.rope_scaling.reset();
  for (const RopeType type : {RopeType::linear, RopeType::dynamic, RopeType::yarn}) {
    if (!scales || rope.scaling != name_of(type)) continue;
    try {
      config.rope_scaling = rope_scaling_by_factor(config, type, *rope.scale);
    } catch (const Error& error) {
      throw Error(fmt::format("--rope-scaling {} --rope-scale {}: {}", rope.scaling, *rope.scale,
                              error.what()));
    }
  }
}

std::string name_of_longest(const ModelConfig& config) {
  if (config.longest_context() == config.max_position_embeddings) return "max_position_embeddings";
  return fmt::format("longest context with RoPE scaling {}", name_of(config.rope_scaling->type));
}

nlohmann::ordered_json rope_json(const ModelConfig& config) {
  if (!config.rope_scaling) return nullptr;
  const RopeScaling& scaling = *config.rope_scaling;
  return {{"type", name_of(scaling.type)},
          {"factor", scaling.factor},
          {"original_max_position_embeddings", scaling.original_max_position_embeddings},
          {"attention_factor", scaling.attention_factor},
          {"longest_context", config.longest_context()}};
}

}  // namespace kvzap::driver
