// IBM Granite 3: Llama with factors of embedding, attention, residuals and logits.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family granite = [] {
  Family family;
  family.class_name = "GraniteForCausalLM";
  family.model_type = "granite";
  family.tested = family_tests;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
    config.mlp_bias = fields.flag("mlp_bias", false);
    config.embedding_multiplier = read_multiplier(fields, "embedding_multiplier");
    config.residual_multiplier = read_multiplier(fields, "residual_multiplier");
    config.attention_multiplier = read_multiplier(fields, "attention_multiplier");
    config.logits_divisor = read_multiplier(fields, "logits_scaling");
  };
  return family;
}();

}  // namespace kvzap::model
