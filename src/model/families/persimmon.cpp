// Persimmon of Adept: LayerNorms of the residual stream and of heads, RoPE of half of each head,
// and one tensor for queries, keys and values, head by head.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family persimmon = [] {
  Family family;
  family.class_name = "PersimmonForCausalLM";
  family.model_type = "persimmon";
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.norm_eps_field = "layer_norm_eps";
  family.rope.default_rotary_factor = 0.5;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    require_own_kv_heads(fields, config);
    set_layer_norms(config);
    config.gates_feed_forward = false;
    config.activation = read_activation(fields, "hidden_act", Activation::relu2);
    config.qkv_bias = config.o_bias = config.mlp_bias = true;
    if (fields.flag("qk_layernorm", true)) config.qk_norm = QkNorm::layer_of_head;
    fields.get("hidden_dropout");
  };
  family.tensors.final_norm = "model.final_layernorm";
  family.tensors.qkv = "self_attn.query_key_value";
  family.tensors.qkv_by_head = true;
  family.tensors.q_norm = "self_attn.q_layernorm";
  family.tensors.k_norm = "self_attn.k_layernorm";
  family.tensors.head_norms_have_biases = true;
  family.tensors.output = "self_attn.dense";
  family.tensors.up = "dense_h_to_4h";
  family.tensors.down = "dense_4h_to_h";
  return family;
}();

}  // namespace kvzap::model
