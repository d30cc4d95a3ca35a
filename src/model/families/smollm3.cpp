// SmolLM3: every fourth layer has no RoPE.
#include "model/families/families.hpp"

namespace kvzap::model {
const Family smollm3 = [] {
  Family family;
  family.class_name = "SmolLM3ForCausalLM";
  family.model_type = "smollm3";
  family.tested = family_tests;
  family.default_key_value_heads = 4;
  family.ties_by_default = true;
  family.rope.default_theta = 2e6;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
    config.mlp_bias = fields.flag("mlp_bias", false);
    read_rope_layers(fields, false, config);
    fields.get("sliding_window");
    const bool uses_window = fields.flag("use_sliding_window", false);
    const std::int64_t window = uses_window ? sliding_window_or(fields, 0) : 0;
    std::vector<bool> slides;
    for (const LayerConfig& layer : config.layers) slides.push_back(!layer.has_rope);
    read_windows(fields, window, slides, config);
  };
  return family;
}();

}  // namespace kvzap::model
