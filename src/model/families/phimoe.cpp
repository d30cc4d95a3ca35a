// Phi-3.5-MoE: LayerNorms, biases, and two experts for each token, which SparseMixer weighs.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family phimoe = [] {
  Family family;
  family.class_name = "PhimoeForCausalLM";
  family.other_classes = {"PhiMoEForCausalLM"};
  family.model_type = "phimoe";
  family.tested = family_tests;
  family.default_key_value_heads = 8;
  family.default_norm_eps = 1e-5;
  family.rope.default_theta = 1e6;
  family.rope.has_mscales = true;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    constexpr double smallest_noise = 1e-6;
    set_layer_norms(config);
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
    config.head_bias = fields.flag("lm_head_bias", false);
    set_window(fields, sliding_window_or(fields, 0), config);
    read_experts_everywhere(fields, 2, config);
    fields.require("num_experts_per_tok", 2);  // whatever it says, the class takes two
    config.experts->normalises = false;
    config.experts->mixer_margin =
        2 * fields.find_number("router_jitter_noise", smallest_noise, 1).value_or(0.01);
    fields.get("input_jitter_noise");  // in training
  };
  family.tensors.router = "block_sparse_moe.gate";
  family.tensors.expert_gate = "block_sparse_moe.experts.{}.w1";
  family.tensors.expert_up = "block_sparse_moe.experts.{}.w3";
  family.tensors.expert_down = "block_sparse_moe.experts.{}.w2";
  return family;
}();

}  // namespace kvzap::model
