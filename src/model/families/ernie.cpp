// ERNIE 4.5 of Baidu, dense and with experts.
#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

Family ernie_family() {
  Family family;
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.ties_by_default = true;
  family.rope.default_theta = 500000;
  family.rope.is_interleaved = true;
  return family;
}

/// Every interval-th layer from a first one to a last one has experts.
void read_ernie_layers(ConfigFields& fields, ModelConfig& config) {
  const double first = fields.find_number("moe_layer_start_index", 0, max_size).value_or(1);
  const double last = fields.find_number("moe_layer_end_index", -1, max_size).value_or(-1);
  const std::int64_t interval = fields.find_size("moe_layer_interval", max_size).value_or(1);
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
    const auto index = static_cast<double>(l);
    config.layers[static_cast<std::size_t>(l)].has_experts =
        (l + 1) % interval == 0 && index >= first && (last == -1 || index <= last);
  }
}

void read_ernie_experts(ConfigFields& fields, ModelConfig& config) {
  ExpertsConfig experts = read_experts(fields, "moe_num_experts", 6, config, "moe_k");
  experts.intermediate_size = fields.find_size("moe_intermediate_size", max_size).value_or(1536);
  experts.has_correction = true;
  experts.normalises = true;
  fields.get("moe_norm_min");  // far below any sum of weights
  constexpr const char* shared_field = "moe_num_shared_experts";
  const nlohmann::json* const shared = fields.get(shared_field);
  if (shared == nullptr || *shared != 0) read_shared_width(fields, shared_field, 2, experts);
  config.experts = experts;
}

}  // namespace

const Family ernie4_5 = [] {
  Family family = ernie_family();
  family.class_name = "Ernie4_5ForCausalLM";
  family.other_classes = {"Ernie4_5_ForCausalLM"};
  family.model_type = "ernie4_5";
  family.default_key_value_heads = 2;
  family.default_head_dim = 128;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.qkv_bias = config.o_bias = config.mlp_bias = fields.flag("use_bias", false);
  };
  return family;
}();

const Family ernie4_5_moe = [] {
  Family family = ernie_family();
  family.class_name = "Ernie4_5_MoeForCausalLM";
  family.model_type = "ernie4_5_moe";
  family.default_key_value_heads = 4;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    fields.require("use_bias", false);
    read_ernie_layers(fields, config);
    read_ernie_experts(fields, config);
    fields.get("num_nextn_predict_layers");  // for speculation; never part of the answer
  };
  family.tensors.correction = "mlp.moe_statics.e_score_correction_bias";
  family.tensors.correction_is_matrix = true;
  return family;
}();

}  // namespace kvzap::model
