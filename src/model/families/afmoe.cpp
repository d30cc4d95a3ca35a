// Trinity of Arcee: gated attention, norms around each part, RoPE in layers with a window only.
#include <cmath>

#include "model/families/families.hpp"

namespace kvzap::model {

const Family afmoe = [] {
  Family family;
  family.class_name = "AfmoeForCausalLM";
  family.model_type = "afmoe";
  family.tested = family_tests;
  family.default_head_dim = 128;
  family.default_norm_eps = 1e-5;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.qk_norm = QkNorm::head;
    config.gates_attention = true;
    fields.require("attention_bias", false);
    if (fields.flag("mup_enabled", false)) {
      config.embedding_multiplier = std::sqrt(static_cast<double>(config.hidden_size));
    }
    const std::int64_t pattern =
        fields.find_size("global_attn_every_n_layers", max_size).value_or(4);
    read_pattern_of_windows(fields, sliding_window_or(fields, 1024), pattern, config);
    for (LayerConfig& layer : config.layers) layer.has_rope = layer.window > 0;
    GroupedExperts rules;
    rules.count_field = "num_experts";
    rules.default_per_token = 6;
    rules.shared_field = "num_shared_experts";
    rules.default_shared = 2;
    rules.default_width = 1408;
    rules.scale_field = "route_scale";
    rules.has_groups = false;
    read_grouped_experts(fields, rules, config);
    fields.require("score_func", "sigmoid");
    fields.require("route_norm", true);
    read_leading_dense(fields, 1, config, "num_dense_layers");
  };
  family.tensors.attention_out = "post_attention_layernorm";
  family.tensors.feed_forward_in = "pre_mlp_layernorm";
  family.tensors.feed_forward_out = "post_mlp_layernorm";
  family.tensors.attention_gate = "self_attn.gate_proj";
  family.tensors.router = "mlp.router.gate";
  family.tensors.correction = "mlp.expert_bias";
  return family;
}();

}  // namespace kvzap::model
