// Mellum of JetBrains: Qwen3's experts, and RoPE of their own in layers with a window.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family mellum = [] {
  Family family;
  family.class_name = "MellumForCausalLM";
  family.model_type = "mellum";
  family.tested = family_tests;
  family.default_key_value_heads = 4;
  family.default_head_dim = 128;
  family.rope.default_theta = 500000;
  family.rope.default_window_theta = 10000;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    const nlohmann::json* const rope = fields.get("rope_parameters");
    if (rope != nullptr && !rope->contains("full_attention")) {
      fields.fail("rope_parameters", "an object with full_attention", files::described(*rope));
    }
    config.qk_norm = QkNorm::head;
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
    const std::vector<bool> none(config.layers.size(), false);
    read_windows(fields, sliding_window_or(fields, 1024), none, config);
    const bool is_renamed =
        fields.get("num_experts") == nullptr && fields.has_key("num_local_experts");
    ExpertsConfig experts =
        read_experts(fields, is_renamed ? "num_local_experts" : "num_experts", 8, config);
    experts.intermediate_size = fields.find_size("moe_intermediate_size", max_size).value_or(896);
    experts.normalises = fields.flag("norm_topk_prob", true);
    config.experts = experts;
    for (LayerConfig& layer : config.layers) layer.has_experts = true;
    read_sparse_types(fields, config);
    // Further layers that predict later tokens. Nothing here uses them.
    for (const char* field :
         {"num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types"}) {
      fields.get(field);
    }
  };
  return family;
}();

}  // namespace kvzap::model
