// Arcee's AFM: Llama whose feed-forward parts have no gate and square a ReLU.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family arcee = [] {
  Family family;
  family.class_name = "ArceeForCausalLM";
  family.model_type = "arcee";
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.gates_feed_forward = false;
    config.activation = read_activation(fields, "hidden_act", Activation::relu2);
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
    config.mlp_bias = fields.flag("mlp_bias", false);
  };
  return family;
}();

}  // namespace kvzap::model
