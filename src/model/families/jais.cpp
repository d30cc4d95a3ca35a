// Jais 2 of Inception: Llama with LayerNorms, biases, and feed-forward parts without a gate.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family jais2 = [] {
  Family family;
  family.class_name = "Jais2ForCausalLM";
  family.model_type = "jais2";
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.norm_eps_field = "layer_norm_eps";
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    set_layer_norms(config);
    config.gates_feed_forward = false;
    config.activation = read_activation(fields, "hidden_act", Activation::relu2);
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", true);
    config.mlp_bias = fields.flag("mlp_bias", true);
  };
  return family;
}();

}  // namespace kvzap::model
