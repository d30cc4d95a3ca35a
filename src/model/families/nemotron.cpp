// Nemotron-4 and Minitron: LayerNorms whose weights are stored less 1, RoPE of a part of each head,
// and feed-forward parts without a gate.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family nemotron = [] {
  Family family;
  family.class_name = "NemotronForCausalLM";
  family.model_type = "nemotron";
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.norm_eps_field = "norm_eps";
  family.rope.default_rotary_factor = 0.5;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    set_layer_norms(config);
    config.gates_feed_forward = false;
    config.activation = read_activation(fields, "hidden_act", Activation::relu2);
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
    config.mlp_bias = fields.flag("mlp_bias", false);
  };
  family.tensors.norms_add_one = true;
  return family;
}();

}  // namespace kvzap::model
