// Falcon-H1: attention and Mamba-2 side by side in each layer, with factors of most parts.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

using nlohmann::json;

/// Reads a list of `count` factors; ones without the field.
std::vector<double> read_multipliers(ConfigFields& fields, const char* field, std::size_t count) {
  constexpr double largest = 1e6;
  const json* const list = fields.get(field);
  if (list == nullptr) return std::vector<double>(count, 1);
  const auto is_factor = [](const json& factor) {
    return factor.is_number() && factor >= 1 / largest && factor <= largest;
  };
  if (!list->is_array() || list->size() != count ||
      !std::all_of(list->begin(), list->end(), is_factor)) {
    fields.fail(field, fmt::format("{} numbers above 0", count), files::described(*list));
  }
  return list->get<std::vector<double>>();
}

std::int64_t inner_size(ConfigFields& fields, const ModelConfig& config) {
  constexpr const char* field = "mamba_d_ssm";
  if (!fields.has_key(field)) return 1024;
  const std::int64_t expanded = expanded_size(fields, config);
  return fields.find_size(field, max_size).value_or(expanded);
}

void read_multipliers_of_space(ConfigFields& fields, StateSpaceConfig& space) {
  const std::vector<double> own = read_multipliers(fields, "ssm_multipliers", 5);
  constexpr const char* field = "ssm_in_multiplier";
  const double of_input = read_multiplier(fields, field);
  if (space.has_projection_bias && of_input != 1) {
    fields.fail(field, "1, as the projection has a bias", fmt::format("{}", of_input));
  }
  for (std::size_t i = 0; i < own.size(); ++i) space.in_multipliers[i] = of_input * own[i];
  space.out_multiplier = read_multiplier(fields, "ssm_out_multiplier");
}

void read_falcon_h1(ConfigFields& fields, ModelConfig& config) {
  using Gating = StateSpaceConfig::Gating;
  config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
  config.mlp_bias = fields.flag("mlp_bias", false);
  StateSpaceFields names;
  names.inner = inner_size;
  read_state_space(fields, names, config);
  StateSpaceConfig& space = *config.state_space;
  if (fields.flag("projectors_bias", false) != space.has_projection_bias) {
    fields.fail("projectors_bias", fmt::format("mamba_proj_bias ({})", space.has_projection_bias),
                fmt::format("{}", !space.has_projection_bias));
  }
  const bool norm_first = fields.flag("mamba_norm_before_gate", true);
  space.gating = norm_first ? Gating::norm_before_gate : Gating::gate_before_norm;
  if (!fields.flag("mamba_rms_norm", false)) space.gating = Gating::gate;
  read_multipliers_of_space(fields, space);

  // Scorers see the input of attention before this factor.
  fields.require("attention_in_multiplier", 1.0);
  const double of_keys = read_multiplier(fields, "key_multiplier");
  config.attention_multiplier = of_keys / std::sqrt(static_cast<double>(config.head_dim));
  config.attention_out_multiplier = read_multiplier(fields, "attention_out_multiplier");
  const std::vector<double> of_feed_forward = read_multipliers(fields, "mlp_multipliers", 2);
  config.gate_multiplier = of_feed_forward[0];
  config.feed_forward_multiplier = of_feed_forward[1];
  config.embedding_multiplier = read_multiplier(fields, "embedding_multiplier");
  config.logits_divisor = 1 / read_multiplier(fields, "lm_head_multiplier");
  for (LayerConfig& layer : config.layers) layer.mixing = TokenMixing::attention_and_state_space;
  for (const char* of_others : {"num_logits_to_keep", "mamba_expand", "attn_layer_indices",
                                "mamba_use_mlp", "layer_types", "layers_block_type"}) {
    fields.get(of_others);
  }
}

}  // namespace

const Family falcon_h1 = [] {
  Family family;
  family.class_name = "FalconH1ForCausalLM";
  family.model_type = "falcon_h1";
  family.tested = family_tests;
  family.default_key_value_heads = 8;
  family.default_norm_eps = 1e-5;
  family.read = read_falcon_h1;
  family.tensors.final_norm = "model.final_layernorm";
  family.tensors.feed_forward_in = "pre_ff_layernorm";
  family.tensors.feed_forward = "feed_forward";
  return family;
}();

}  // namespace kvzap::model
