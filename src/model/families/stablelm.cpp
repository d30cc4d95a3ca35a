// StableLM 2 and StableLM 3B: LayerNorms and RoPE of a part of each head.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family stablelm = [] {
  Family family;
  family.class_name = "StableLmForCausalLM";
  family.model_type = "stablelm";
  family.tested = family_tests;
  family.default_key_value_heads = 32;
  family.default_norm_eps = 1e-5;
  family.norm_eps_field = "layer_norm_eps";
  family.rope.default_rotary_factor = 0.25;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    set_layer_norms(config);
    config.activation = read_activation(fields, "hidden_act", Activation::silu);
    config.qkv_bias = fields.flag("use_qkv_bias", false);
    config.is_parallel = config.shares_norm = fields.flag("use_parallel_residual", false);
    if (fields.flag("qk_layernorm", false)) config.qk_norm = QkNorm::layer_of_head;
    fields.get("hidden_dropout");
  };
  family.tensors.q_norm = "self_attn.q_layernorm.norms.{}";
  family.tensors.k_norm = "self_attn.k_layernorm.norms.{}";
  return family;
}();

}  // namespace kvzap::model
