// Solar Open of Upstage: experts as in GLM-4.5 in all layers.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family solar_open = [] {
  Family family;
  family.class_name = "SolarOpenForCausalLM";
  family.model_type = "solar_open";
  family.tested = family_tests;
  family.default_key_value_heads = 8;
  family.default_head_dim = 128;
  family.default_norm_eps = 1e-5;
  family.width_field = "moe_intermediate_size";
  family.rope.default_theta = 1e6;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.qkv_bias = fields.flag("attention_bias", false);
    fields.get("intermediate_size");  // of dense layers, which the class does not have
    fields.require("first_k_dense_replace", 0);
    read_grouped_experts(fields, GroupedExperts(), config);
    for (LayerConfig& layer : config.layers) layer.has_experts = true;
  };
  return family;
}();

}  // namespace kvzap::model
