// OLMo: LayerNorms without weights. OLMo 2 and 3: norms after attention and feed-forward part
// instead of before, and of whole rows of queries and keys. In OLMo 3 three of four layers have a
// window.
#include <algorithm>

#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

Family olmo_family() {
  Family family;
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.tensors.attention_in = "";
  family.tensors.attention_out = "post_attention_layernorm";
  family.tensors.feed_forward_in = "";
  family.tensors.feed_forward_out = "post_feedforward_layernorm";
  return family;
}

void read_limit(ConfigFields& fields, ModelConfig& config) {
  constexpr double largest_limit = 1e6;
  config.qkv_limit = fields.find_number("clip_qkv", 1 / largest_limit, largest_limit).value_or(0);
}

void read_olmo(ConfigFields& fields, ModelConfig& config) {
  config.qk_norm = QkNorm::row;
  config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
}

}  // namespace

const Family olmo = [] {
  Family family;
  family.class_name = "OlmoForCausalLM";
  family.model_type = "olmo";
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.norm_type = NormType::layer;
    config.activation = read_activation(fields, "hidden_act", Activation::silu);
    read_limit(fields, config);
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
  };
  family.tensors.norms_have_weights = false;
  return family;
}();

const Family olmo2 = [] {
  Family family = olmo_family();
  family.class_name = "Olmo2ForCausalLM";
  family.model_type = "olmo2";
  family.read = read_olmo;
  return family;
}();

const Family olmo3 = [] {
  Family family = olmo_family();
  family.class_name = "Olmo3ForCausalLM";
  family.model_type = "olmo3";
  // The models were trained so; transformers 5.2 scales RoPE in all layers.
  family.rope.windows_are_unscaled = true;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_olmo(fields, config);
    read_pattern_of_windows(fields, sliding_window_or(fields, 4096), 4, config);
  };
  return family;
}();

// OLMoE and FlexOlmo: the same with experts, OLMoE with norms before each part.
namespace {

void read_olmo_experts(ConfigFields& fields, std::int64_t default_per_token, ModelConfig& config) {
  read_olmo(fields, config);
  read_limit(fields, config);
  config.experts = read_experts(fields, "num_experts", default_per_token, config);
  config.experts->normalises = fields.flag("norm_topk_prob", false);
  for (LayerConfig& layer : config.layers) layer.has_experts = true;
}

}  // namespace

const Family olmoe = [] {
  Family family;
  family.class_name = "OlmoeForCausalLM";
  family.model_type = "olmoe";
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_olmo_experts(fields, 8, config);
  };
  return family;
}();

const Family flex_olmo = [] {
  Family family = olmo_family();
  family.class_name = "FlexOlmoForCausalLM";
  family.model_type = "flex_olmo";
  family.default_norm_eps = 1e-6;
  family.rope.default_theta = 500000;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_olmo_experts(fields, 5, config);
  };
  return family;
}();

// OLMo Hybrid: gated delta nets with norms before both parts in most layers, OLMo 2's attention in
// the others, with RoPE or without.
namespace {

void read_olmo_hybrid(ConfigFields& fields, ModelConfig& config) {
  read_olmo(fields, config);
  DeltaNetDefaults absent;
  absent.key_heads = absent.value_heads = config.num_attention_heads;
  const std::int64_t key_heads =
      fields.find_size("linear_num_key_heads", 65536).value_or(absent.key_heads);
  absent.key_dim = std::max<std::int64_t>(1, 3 * config.hidden_size / 4 / key_heads);
  absent.value_dim = 2 * fields.find_size("linear_key_head_dim", 65536).value_or(absent.key_dim);
  DeltaNetConfig net = read_delta_net(fields, absent);
  net.strength_multiplier = fields.flag("linear_allow_neg_eigval", true) ? 2 : 1;
  net.norm_eps = 1e-5;
  config.delta_net = net;
  for (const char* of_training : {"linear_a_log_min", "linear_a_log_max", "linear_dt_min",
                                  "linear_dt_max", "linear_dt_init_floor"}) {
    fields.get(of_training);
  }
  // No rotation is said by a theta that is there and null.
  const nlohmann::json* const rope = fields.get("rope_parameters");
  const bool has_rope =
      rope == nullptr || !rope->contains("rope_theta") || !rope->at("rope_theta").is_null();
  const auto stated = read_layer_types(fields, "linear_attention", config);
  for (std::size_t l = 0; l < config.layers.size(); ++l) {
    const bool is_last_of_few = config.layers.size() < 4 && l + 1 == config.layers.size();
    const bool is_full = stated ? !(*stated)[l] : l % 4 == 3 || is_last_of_few;
    config.layers[l].has_rope = has_rope;
    if (!is_full) config.layers[l].mixing = TokenMixing::delta_net;
  }
}

}  // namespace

const Family olmo_hybrid = [] {
  Family family = olmo_family();
  family.class_name = "OlmoHybridForCausalLM";
  family.model_type = "olmo_hybrid";
  family.default_norm_eps = 1e-6;
  family.read = read_olmo_hybrid;
  family.tensors.state_in = "attention_layer_norm";
  family.tensors.state_feed_forward_in = "feedforward_layer_norm";
  family.tensors.delta_maps = {"linear_attn.q_proj", "linear_attn.k_proj", "linear_attn.v_proj"};
  family.tensors.delta_convolutions = {"linear_attn.q_conv1d", "linear_attn.k_conv1d",
                                       "linear_attn.v_conv1d"};
  family.tensors.delta_gates = "linear_attn.g_proj";
  family.tensors.delta_strengths = "linear_attn.b_proj";
  family.tensors.delta_decays = "linear_attn.a_proj";
  family.tensors.delta_norm = "linear_attn.o_norm";
  family.tensors.delta_output = "linear_attn.o_proj";
  return family;
}();

}  // namespace kvzap::model
