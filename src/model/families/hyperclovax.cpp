// HyperCLOVA X of NAVER: norms around each part, and factors as in Granite.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family hyperclovax = [] {
  Family family;
  family.class_name = "HyperCLOVAXForCausalLM";
  family.model_type = "hyperclovax";
  family.tested = family_tests;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
    config.mlp_bias = fields.flag("mlp_bias", false);
    config.embedding_multiplier = read_multiplier(fields, "embedding_multiplier");
    config.residual_multiplier = read_multiplier(fields, "residual_multiplier");
    config.logits_divisor = 1 / read_multiplier(fields, "logits_scaling");
    if (fields.get("attention_multiplier") != nullptr) {
      config.attention_multiplier = read_multiplier(fields, "attention_multiplier");
    }
    fields.require("use_post_norm", true);
  };
  family.tensors.attention_out = "post_norm1";
  family.tensors.feed_forward_out = "post_norm2";
  return family;
}();

}  // namespace kvzap::model
