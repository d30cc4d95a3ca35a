// Helium of Kyutai: Llama with RoPE of neighbouring dimensions.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family helium = [] {
  Family family;
  family.class_name = "HeliumForCausalLM";
  family.model_type = "helium";
  family.tested = family_tests;
  family.default_key_value_heads = 20;
  family.default_head_dim = 128;
  family.default_norm_eps = 1e-8;
  family.rope.default_theta = 100000;
  family.rope.is_interleaved = true;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.qkv_bias = fields.flag("attention_bias", false);
    config.mlp_bias = fields.flag("mlp_bias", false);
  };
  return family;
}();

}  // namespace kvzap::model
