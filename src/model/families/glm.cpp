// GLM-4 of 2024 and of 2025 (dense), and GLM-4.5 to 4.7 with experts.
#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

Family dense_glm_family() {
  Family family;
  family.tested = family_tests;
  family.default_key_value_heads = 2;
  family.default_head_dim = 128;
  family.default_norm_eps = 0.00000015625;
  family.rope.default_rotary_factor = 0.5;
  family.rope.is_interleaved = true;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.qkv_bias = fields.flag("attention_bias", true);
  };
  family.tensors.gate_up = "mlp.gate_up_proj";
  return family;
}

}  // namespace

const Family glm = [] {
  Family family = dense_glm_family();
  family.class_name = "GlmForCausalLM";
  family.model_type = "glm";
  return family;
}();

const Family glm4 = [] {
  Family family = dense_glm_family();
  family.class_name = "Glm4ForCausalLM";
  family.model_type = "glm4";
  family.tensors.attention_out = "post_self_attn_layernorm";
  family.tensors.feed_forward_out = "post_mlp_layernorm";
  return family;
}();

const Family glm4_moe = [] {
  Family family;
  family.class_name = "Glm4MoeForCausalLM";
  family.model_type = "glm4_moe";
  family.tested = family_tests;
  family.default_key_value_heads = 8;
  family.default_norm_eps = 1e-5;
  family.rope.default_rotary_factor = 0.5;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.qkv_bias = fields.flag("attention_bias", false);
    if (fields.flag("use_qk_norm", false)) config.qk_norm = QkNorm::head;
    fields.get("num_nextn_predict_layers");  // for speculation; never part of the answer
    read_grouped_experts(fields, GroupedExperts(), config);
    read_leading_dense(fields, 1, config);
  };
  return family;
}();

}  // namespace kvzap::model
