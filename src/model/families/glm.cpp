// GLM-4 of 2025 (dense), and GLM-4.5 to 4.7 with experts.
#include <fmt/format.h>

#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

void read_glm_moe(ConfigFields& fields, ModelConfig& config) {
  ExpertsConfig experts = read_experts(fields, "n_routed_experts", 8, config);
  experts.intermediate_size = fields.size("moe_intermediate_size", max_size);
  experts.scores = ExpertsConfig::Scores::sigmoid;
  experts.has_correction = true;
  experts.normalises = fields.flag("norm_topk_prob", true);
  experts.scale = read_multiplier(fields, "routed_scaling_factor");
  experts.groups = fields.find_size("n_group", experts.count).value_or(1);
  experts.groups_per_token = fields.find_size("topk_group", experts.groups).value_or(1);
  if (experts.count % experts.groups != 0 || experts.count / experts.groups < 2) {
    fields.fail("n_group", fmt::format("groups of 2 or more of the {} experts", experts.count),
                fmt::format("{}", experts.groups));
  }
  const std::int64_t shared = fields.find_size("n_shared_experts", experts.count).value_or(1);
  if (__builtin_mul_overflow(shared, experts.intermediate_size,
                             &experts.shared_intermediate_size) ||
      experts.shared_intermediate_size > max_size) {
    fields.fail("n_shared_experts", fmt::format("a width of at most {}", max_size),
                fmt::format("{} x {}", shared, experts.intermediate_size));
  }
  config.experts = experts;
  const double dense = fields.find_number("first_k_dense_replace", 0, max_size).value_or(1);
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
    config.layers[static_cast<std::size_t>(l)].has_experts = static_cast<double>(l) >= dense;
  }
}

}  // namespace

const Family glm4 = [] {
  Family family;
  family.class_name = "Glm4ForCausalLM";
  family.model_type = "glm4";
  family.tested = family_tests;
  family.default_key_value_heads = 2;
  family.default_head_dim = 128;
  family.default_norm_eps = 0.00000015625;
  family.rope.default_rotary_factor = 0.5;
  family.rope.is_interleaved = true;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.qkv_bias = fields.flag("attention_bias", true);
  };
  family.tensors.attention_out = "post_self_attn_layernorm";
  family.tensors.feed_forward_out = "post_mlp_layernorm";
  family.tensors.gate_up = "mlp.gate_up_proj";
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
    read_glm_moe(fields, config);
  };
  return family;
}();

}  // namespace kvzap::model
