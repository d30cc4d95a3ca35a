// SmolLM3: every fourth layer has no RoPE.
#include <fmt/format.h>

#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

void read_rope_layers(ConfigFields& fields, ModelConfig& config) {
  const std::int64_t interval = fields.find_size("no_rope_layer_interval", max_size).value_or(4);
  const nlohmann::json* const flags = fields.get("no_rope_layers");  // 1: with RoPE
  const auto count = static_cast<std::size_t>(config.num_hidden_layers);
  if (flags != nullptr && (!flags->is_array() || flags->size() != count)) {
    fields.fail("no_rope_layers", fmt::format("an array of {} numbers", count),
                base::described(*flags));
  }
  for (std::size_t l = 0; l < count; ++l) {
    LayerConfig& layer = config.layers[l];
    layer.has_rope = (static_cast<std::int64_t>(l) + 1) % interval != 0;
    if (flags != nullptr) {
      const nlohmann::json& flag = (*flags)[l];
      if (flag != 0 && flag != 1) fields.fail("no_rope_layers", "0 or 1", base::described(flag));
      layer.has_rope = flag == 1;
    }
  }
}

}  // namespace

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
    read_rope_layers(fields, config);
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
