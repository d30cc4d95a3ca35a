// GLM-4 of 2024 and of 2025 (dense), and GLM-4.5 to 4.7 with experts. Sarvam's models with experts,
// which transformers runs as GLM-4.5.
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

void read_glm_moe(ConfigFields& fields, const GroupedExperts& rules, bool has_qk_norm,
                  ModelConfig& config) {
  config.qkv_bias = fields.flag("attention_bias", false);
  if (fields.flag("use_qk_norm", has_qk_norm)) config.qk_norm = QkNorm::head;
  // For speculation; never part of the answer.
  for (const char* field : {"num_nextn_predict_layers", "num_mtp_layers"}) fields.get(field);
  read_grouped_experts(fields, rules, config);
  read_leading_dense(fields, 1, config);
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
    read_glm_moe(fields, GroupedExperts(), false, config);
  };
  return family;
}();

const Family sarvam_moe = [] {
  Family family;
  family.class_name = "SarvamMoEForCausalLM";
  family.other_classes = {"Glm4MoeForCausalLM"};
  family.model_type = "sarvam_moe";
  family.tested = family_tests;
  family.default_key_value_heads = 4;
  family.default_head_dim = 64;
  family.rope.default_theta = 8e6;
  family.rope.default_rotary_factor = 1;
  family.rename = [](ConfigContent& content) {
    rename_field(content, "num_experts", "n_routed_experts");
    rename_field(content, "num_shared_experts", "n_shared_experts");
    rename_field(content, "use_qkv_bias", "attention_bias");
  };
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    GroupedExperts rules;
    rules.default_per_token = 6;
    rules.default_width = 1024;
    rules.default_scale = 2.5;
    read_glm_moe(fields, rules, true, config);
    for (const char* field : {"num_experts", "num_shared_experts", "use_qkv_bias"}) {
      fields.get(field);
    }
  };
  family.tensors.embedding = "model.word_embeddings";
  family.tensors.qkv = "attention.query_key_value";
  family.tensors.output = "attention.dense";
  family.tensors.q_norm = "attention.query_layernorm";
  family.tensors.k_norm = "attention.key_layernorm";
  family.tensors.correction = "mlp.gate.expert_bias";
  return family;
}();

}  // namespace kvzap::model
