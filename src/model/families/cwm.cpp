// Code World Model of Meta: Llama with windows in three layers of four.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family cwm = [] {
  Family family;
  family.class_name = "CwmForCausalLM";
  family.model_type = "cwm";
  family.tested = family_tests;
  family.default_key_value_heads = 8;
  family.default_head_dim = 128;
  family.default_norm_eps = 1e-5;
  family.rope.default_theta = 1e6;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.mlp_bias = fields.flag("mlp_bias", false);
    ignore_bias(fields, "attention_bias", config);
    if (!fields.has_key("rope_scaling") && !fields.has_key("rope_parameters")) {
      fields.fail("rope_parameters", "an object with RoPE's parameters", "none");
    }
    std::vector<bool> slides;
    for (std::size_t l = 0; l < config.layers.size(); ++l) slides.push_back(l % 4 != 0);
    read_windows(fields, sliding_window_or(fields, 8192), slides, config);
  };
  return family;
}();

}  // namespace kvzap::model
