// Phi-1, Phi-1.5 and Phi-2: attention and feed-forward part side by side, LayerNorms and biases
// everywhere. Phi-3, Phi-3.5-mini, Phi-4 and Phi-4-mini.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family phi = [] {
  Family family;
  family.class_name = "PhiForCausalLM";
  family.model_type = "phi";
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.norm_eps_field = "layer_norm_eps";
  family.rope.default_rotary_factor = 0.5;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    set_layer_norms(config);
    config.is_parallel = config.shares_norm = true;
    config.gates_feed_forward = false;
    config.activation = read_activation(fields, "hidden_act", Activation::gelu_tanh);
    config.qkv_bias = config.o_bias = config.mlp_bias = config.head_bias = true;
    if (fields.flag("qk_layernorm", false)) config.qk_norm = QkNorm::layer_of_head;
  };
  family.tensors.q_norm = "self_attn.q_layernorm";
  family.tensors.k_norm = "self_attn.k_layernorm";
  family.tensors.head_norms_have_biases = true;
  family.tensors.final_norm = "model.final_layernorm";
  family.tensors.output = "self_attn.dense";
  family.tensors.up = "fc1";
  family.tensors.down = "fc2";
  return family;
}();

const Family phi3 = [] {
  Family family;
  family.class_name = "Phi3ForCausalLM";
  family.model_type = "phi3";
  family.text_defaults =
      R"({"vocab_size":32064,"hidden_size":3072,"intermediate_size":8192,"num_hidden_layers":32,)"
      R"("num_attention_heads":32,"max_position_embeddings":4096})";
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.rope.default_rotary_factor = 1;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    ignore_bias(fields, "attention_bias", config);
    ignore_bias(fields, "mlp_bias", config);
    set_window(fields, sliding_window_or(fields, 0), config);
  };
  family.tensors.qkv = "self_attn.qkv_proj";
  family.tensors.gate_up = "mlp.gate_up_proj";
  return family;
}();

}  // namespace kvzap::model
