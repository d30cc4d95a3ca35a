#include "options/rope_options.hpp"

#include <fmt/format.h>

#include "options/options.hpp"
#include "session/model_setup.hpp"

namespace kvzap::driver {

void apply_rope(const RopeOptions& rope, ModelConfig& config) {
  const bool scales = !rope.scaling.empty() && rope.scaling != "none";
  require(scales || !rope.scale,
          fmt::format("--rope-scale needs --rope-scaling linear, dynamic or yarn{}",
                      rope.scaling.empty() ? "" : "; it is none"));
  require(
      !scales || rope.scale,
      fmt::format("--rope-scaling {} needs --rope-scale, the factor by which texts may be longer",
                  rope.scaling));
  try {
    session::scale_rope(config, rope.scaling, rope.scale.value_or(1));
  } catch (const Error& error) {
    throw UsageError(fmt::format("--rope-scaling {} --rope-scale {}: {}", rope.scaling, *rope.scale,
                                 error.what()));
  }
}

std::string name_of_longest(const ModelConfig& config) {
  if (config.longest_context() == config.max_position_embeddings) return "max_position_embeddings";
  return fmt::format("longest context with RoPE scaling {}", name_of(config.rope_scaling->type));
}

std::string hint_for_longer(const ModelConfig& config, std::int64_t tokens) {
  if (config.rope_scaling) return " (--rope-scale extends it)";
  const std::int64_t longest = config.longest_context();
  return fmt::format(" (to scale RoPE for longer texts: --rope-scaling yarn --rope-scale {})",
                     tokens / longest + (tokens % longest == 0 ? 0 : 1));
}

std::int64_t context_limit(const std::optional<std::int64_t>& max_context,
                           const ModelConfig& config, bool has_random_weights) {
  const std::int64_t longest = has_random_weights ? 0 : config.longest_context();
  const std::int64_t limit = max_context.value_or(longest);
  require(longest == 0 || limit <= longest,
          fmt::format("-c is {}; the model's {} is {}{}", limit, name_of_longest(config), longest,
                      hint_for_longer(config, limit)));
  return limit;
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
