// OLMo 2: norms after attention and feed-forward part instead of before, and of whole rows of
// queries and keys.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family olmo2 = [] {
  Family family;
  family.class_name = "Olmo2ForCausalLM";
  family.model_type = "olmo2";
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.qk_norm = QkNorm::row;
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
  };
  family.tensors.attention_in = "";
  family.tensors.attention_out = "post_attention_layernorm";
  family.tensors.feed_forward_in = "";
  family.tensors.feed_forward_out = "post_feedforward_layernorm";
  return family;
}();

}  // namespace kvzap::model
