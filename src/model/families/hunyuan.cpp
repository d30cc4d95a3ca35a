// HunYuan of Tencent, dense and with experts: norms of heads follow RoPE.
#include <fmt/format.h>

#include <algorithm>

#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

Family hunyuan_family() {
  Family family;
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.rope.has_alpha = true;
  family.tensors.q_norm = "self_attn.query_layernorm";
  family.tensors.k_norm = "self_attn.key_layernorm";
  return family;
}

void read_hunyuan(ConfigFields& fields, ModelConfig& config) {
  config.qk_norm = QkNorm::head;
  config.rotates_before_norms = true;
  config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
  ignore_bias(fields, "mlp_bias", config);
  fields.require("use_qk_norm", true);
  fields.require("use_cla", false);
}

/// Requires that a field is absent, `expected`, or a list of this number alone.
void require_everywhere(ConfigFields& fields, const char* field, std::int64_t expected) {
  const nlohmann::json* const value = fields.get(field);
  const auto differs = [&](const nlohmann::json& one) { return one != expected; };
  if (value == nullptr) return;
  if (value->is_array() ? std::any_of(value->begin(), value->end(), differs) : differs(*value)) {
    fields.fail(field, fmt::format("{} in all layers", expected), files::described(*value));
  }
}

}  // namespace

const Family hunyuan_v1_dense = [] {
  Family family = hunyuan_family();
  family.class_name = "HunYuanDenseV1ForCausalLM";
  family.model_type = "hunyuan_v1_dense";
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_hunyuan(fields, config);
    require_everywhere(fields, "num_experts", 1);
  };
  return family;
}();

const Family hunyuan_v1_moe = [] {
  Family family = hunyuan_family();
  family.class_name = "HunYuanMoEV1ForCausalLM";
  family.model_type = "hunyuan_v1_moe";
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_hunyuan(fields, config);
    // Lists have a number for each layer.
    const nlohmann::json* const listed = fields.get("moe_topk");
    const bool is_list = listed != nullptr && listed->is_array() && !listed->empty();
    ExpertsConfig experts = read_experts(fields, "num_experts", 1, config,
                                         is_list ? "num_experts_per_tok" : "moe_topk");
    if (is_list) {
      const nlohmann::json& first = listed->front();
      if (!first.is_number_integer() || first < 1 || first > experts.count) {
        fields.fail("moe_topk", fmt::format("numbers from 1 to num_experts ({})", experts.count),
                    files::described(first));
      }
      experts.per_token = first.get<std::int64_t>();
      require_everywhere(fields, "moe_topk", experts.per_token);
    }
    require_everywhere(fields, "moe_intermediate_size", experts.intermediate_size);
    require_everywhere(fields, "num_shared_expert", 1);
    fields.require("norm_topk_prob", true);
    experts.normalises = true;
    experts.shared_intermediate_size = experts.intermediate_size;
    config.experts = experts;
    for (LayerConfig& layer : config.layers) layer.has_experts = true;
  };
  family.tensors.router = "mlp.gate.wg";
  family.tensors.shared = "mlp.shared_mlp";
  return family;
}();

// The third generation: norms before RoPE, experts chosen by sigmoids.
const Family hy_v3 = [] {
  Family family;
  family.class_name = "HYV3ForCausalLM";
  family.model_type = "hy_v3";
  family.tested = family_tests;
  family.default_key_value_heads = 8;
  family.default_head_dim = 128;
  family.default_norm_eps = 1e-5;
  family.rope.default_theta = 11158840;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.qk_norm = QkNorm::head;
    fields.require("qk_norm", true);
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
    fields.require("mlp_bias", false);
    GroupedExperts rules;
    rules.count_field = "num_experts";
    rules.shared_field = "num_shared_experts";
    rules.scale_field = "router_scaling_factor";
    rules.has_groups = false;
    rules.default_width = 1536;
    rules.default_scale = 2.826;
    read_grouped_experts(fields, rules, config);
    read_leading_dense(fields, 1, config);
    read_sparse_types(fields, config);
    fields.get("enable_moe_fp32_combine");   // of other value types
    fields.get("num_nextn_predict_layers");  // for speculation; never part of the answer
  };
  family.tensors.router = "mlp.router.gate";
  family.tensors.correction = "mlp.expert_bias";
  family.tensors.shared = "mlp.shared_mlp";
  return family;
}();

}  // namespace kvzap::model
