// StarCoder2: LayerNorms, biases everywhere, and feed-forward parts without a gate.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family starcoder2 = [] {
  Family family;
  family.class_name = "Starcoder2ForCausalLM";
  family.model_type = "starcoder2";
  family.tested = family_tests;
  family.default_key_value_heads = 2;
  family.default_norm_eps = 1e-5;
  family.norm_eps_field = "norm_epsilon";
  family.ties_by_default = true;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    set_layer_norms(config);
    config.gates_feed_forward = false;
    config.activation = read_activation(fields, "hidden_act", Activation::gelu_tanh);
    config.qkv_bias = config.o_bias = config.mlp_bias = fields.flag("use_bias", true);
    set_window(fields, sliding_window_or(fields, 0), config);
    for (const char* field : {"embedding_dropout", "residual_dropout"}) fields.get(field);
    fields.require("norm_type", "layer_norm");
    fields.require("mlp_type", "default");
  };
  family.tensors.up = "c_fc";
  family.tensors.down = "c_proj";
  return family;
}();

}  // namespace kvzap::model
