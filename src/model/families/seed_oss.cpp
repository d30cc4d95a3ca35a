// Seed-OSS of ByteDance: Llama with biases on queries, keys and values.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family seed_oss = [] {
  Family family;
  family.class_name = "SeedOssForCausalLM";
  family.model_type = "seed_oss";
  family.tested = family_tests;
  family.default_key_value_heads = 8;
  family.default_head_dim = 128;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.qkv_bias = fields.flag("attention_bias", true);
    config.o_bias = fields.flag("attention_out_bias", false);
    config.mlp_bias = fields.flag("mlp_bias", false);
    fields.get("residual_dropout");  // of training
  };
  return family;
}();

}  // namespace kvzap::model
