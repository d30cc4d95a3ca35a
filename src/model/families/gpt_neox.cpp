// GPT-NeoX and Pythia: attention and feed-forward part side by side, each with a LayerNorm of its
// own, and one tensor for queries, keys and values, head by head.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family gpt_neox = [] {
  Family family;
  family.class_name = "GPTNeoXForCausalLM";
  family.model_type = "gpt_neox";
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.norm_eps_field = "layer_norm_eps";
  family.rope.default_rotary_factor = 0.25;
  family.rope.has_older_names = true;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    if (config.num_key_value_heads != config.num_attention_heads) {
      fields.require("num_key_value_heads", config.num_attention_heads);
    }
    set_layer_norms(config);
    config.is_parallel = fields.flag("use_parallel_residual", true);
    config.gates_feed_forward = false;
    config.activation = read_activation(fields, "hidden_act", Activation::gelu);
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", true);
    config.mlp_bias = true;
    fields.get("hidden_dropout");
  };
  family.tensors.layers = "gpt_neox.layers.";
  family.tensors.embedding = "gpt_neox.embed_in";
  family.tensors.final_norm = "gpt_neox.final_layer_norm";
  family.tensors.head = "embed_out";
  family.tensors.qkv = "attention.query_key_value";
  family.tensors.qkv_by_head = true;
  family.tensors.output = "attention.dense";
  family.tensors.up = "dense_h_to_4h";
  family.tensors.down = "dense_4h_to_h";
  return family;
}();

}  // namespace kvzap::model
