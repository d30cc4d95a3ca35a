// BitNet b1.58 with plain weights: squared ReLUs, and norms of the inputs of the last maps.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family bitnet = [] {
  Family family;
  family.class_name = "BitNetForCausalLM";
  family.model_type = "bitnet";
  family.tested = family_tests;
  family.default_key_value_heads = 5;
  family.default_norm_eps = 1e-5;
  family.rope.default_theta = 500000;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.activation = read_activation(fields, "hidden_act", Activation::relu2);
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
    config.has_inner_norms = true;
    require_heads_of_hidden_size(fields, config);
  };
  family.tensors.attention_inner = "self_attn.attn_sub_norm";
  family.tensors.feed_forward_inner = "mlp.ffn_sub_norm";
  return family;
}();

}  // namespace kvzap::model
