// MiniMax-Text-01: lightning attention in most layers, residual connections from normed inputs.
// MiniMax M2: experts chosen by sigmoids, norms of whole rows of queries and keys.
#include <fmt/format.h>

#include <utility>

#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

using nlohmann::json;

/// Names of the published files, from before transformers had the class.
void rename_minimax(ConfigContent& content) {
  constexpr std::pair<const char*, const char*> older[] = {
      {"layernorm_full_attention_alpha", "full_attn_alpha_factor"},
      {"layernorm_full_attention_beta", "full_attn_beta_factor"},
      {"layernorm_linear_attention_alpha", "linear_attn_alpha_factor"},
      {"layernorm_linear_attention_beta", "linear_attn_beta_factor"},
      {"layernorm_mlp_alpha", "mlp_alpha_factor"},
      {"layernorm_mlp_beta", "mlp_beta_factor"}};
  for (const auto& [own, name] : older) {
    rename_field(content, own, name);
    content.erase(own);
  }
}

void read_minimax_layers(ConfigFields& fields, ModelConfig& config) {
  const std::int64_t window = sliding_window_or(fields, 0);
  constexpr const char* older = "attn_type_list";
  const json* const kinds = fields.get(older);
  const std::size_t count = config.layers.size();
  if (kinds != nullptr && (!kinds->is_array() || kinds->size() != count)) {
    fields.fail(older, fmt::format("an array of {} numbers", count), files::described(*kinds));
  }
  const auto stated = read_layer_types(fields, "linear_attention", config);
  for (std::size_t l = 0; l < count; ++l) {
    bool is_linear = stated ? (*stated)[l] : l % 2 == 1;
    if (!stated && kinds != nullptr) {
      const json& kind = (*kinds)[l];
      if (kind != 0 && kind != 1) fields.fail(older, "0 or 1", files::described(kind));
      is_linear = kind == 0;
    }
    if (is_linear) {
      config.layers[l].mixing = TokenMixing::delta_net;
    } else {
      config.layers[l].window = window;
    }
  }
}

void read_minimax(ConfigFields& fields, ModelConfig& config) {
  read_experts_everywhere(fields, 2, config);
  fields.require("postnorm", true);
  fields.require("shared_intermediate_size", 0);
  for (const char* unused : {"shared_moe_mode", "block_size"}) fields.get(unused);
  read_minimax_layers(fields, config);
  DeltaNetConfig net;
  net.kind = DeltaNetConfig::Kind::lightning;
  net.key_heads = net.value_heads = config.num_attention_heads;
  net.key_dim = net.value_dim = config.head_dim;
  net.kernel = 1;
  net.norm_eps = 1e-6;
  net.out_multiplier = read_multiplier(fields, "linear_attn_beta_factor");
  if (net.key_heads > max_size / (net.key_dim * net.value_dim)) {
    fields.fail("num_attention_heads",
                fmt::format("states of at most {} values in a layer", max_size),
                fmt::format("{} of {} x {}", net.key_heads, net.key_dim, net.value_dim));
  }
  config.delta_net = net;
  config.attention_out_multiplier = read_multiplier(fields, "full_attn_beta_factor");
  config.feed_forward_multiplier = read_multiplier(fields, "mlp_beta_factor");
  NormedResiduals residuals;
  residuals.attention = read_multiplier(fields, "full_attn_alpha_factor");
  residuals.state = read_multiplier(fields, "linear_attn_alpha_factor");
  residuals.feed_forward = read_multiplier(fields, "mlp_alpha_factor");
  config.normed_residuals = residuals;
}

void name_minimax_experts(TensorNames& names) {
  names.router = "block_sparse_moe.gate";
  names.expert_gate = "block_sparse_moe.experts.{}.w1";
  names.expert_up = "block_sparse_moe.experts.{}.w3";
  names.expert_down = "block_sparse_moe.experts.{}.w2";
}

}  // namespace

const Family minimax = [] {
  Family family;
  family.class_name = "MiniMaxForCausalLM";
  family.other_classes = {"MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"};
  family.model_type = "minimax";
  family.text_types = {"minimax_text_01", "minimax_m1"};
  family.tested = family_tests;
  family.default_key_value_heads = 8;
  family.default_norm_eps = 1e-5;
  family.rope.default_theta = 1e6;
  family.rope.rotary_dim_field = "rotary_dim";
  family.rename = rename_minimax;
  family.read = read_minimax;
  family.tensors.delta_qkvz = "self_attn.qkv_proj";
  family.tensors.delta_gates = "self_attn.output_gate";
  family.tensors.delta_norm = "self_attn.norm";
  family.tensors.delta_output = "self_attn.out_proj";
  name_minimax_experts(family.tensors);
  return family;
}();

const Family minimax_m2 = [] {
  Family family;
  family.class_name = "MiniMaxM2ForCausalLM";
  family.model_type = "minimax_m2";
  family.tested = family_tests;
  family.default_key_value_heads = 8;
  family.default_head_dim = 128;
  family.rope.default_rotary_factor = 1;
  family.rope.default_theta = 5e6;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.qk_norm = QkNorm::row;
    read_experts_everywhere(fields, 8, config);
    config.experts->scores = ExpertsConfig::Scores::sigmoid;
    config.experts->has_correction = true;
  };
  family.tensors.correction = "block_sparse_moe.e_score_correction_bias";
  name_minimax_experts(family.tensors);
  return family;
}();

}  // namespace kvzap::model
