// Cohere's Command R7B and Command A: attention and feed-forward part read the same LayerNorm, and
// only layers with a window have RoPE.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family cohere2 = [] {
  Family family;
  family.class_name = "Cohere2ForCausalLM";
  family.model_type = "cohere2";
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.norm_eps_field = "layer_norm_eps";
  family.ties_by_default = true;
  family.rope.is_interleaved = true;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    constexpr double largest_scale = 1e6;
    config.norm_type = NormType::layer;
    config.is_parallel = config.shares_norm = true;
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
    config.logits_divisor =
        1 / fields.find_number("logit_scale", 1 / largest_scale, largest_scale).value_or(0.0625);
    fields.get("_sliding_window_pattern");  // transformers writes it, and layer_types
    // transformers ignores the number of another pattern.
    fields.require("sliding_window_pattern", 4);
    read_pattern_of_windows(fields, sliding_window_or(fields, 4096), 4, config);
    for (LayerConfig& layer : config.layers) layer.has_rope = layer.window > 0;
    // Fields of other programs.
    fields.require("position_embedding_type", "rope_gptj");
    fields.require("order_of_interleaved_layers", "local_attn_first");
    fields.require("rotary_pct", 1);
    for (const char* field : {"use_gated_activation", "use_parallel_block"}) {
      fields.require(field, true);
    }
    for (const char* field : {"layer_switch", "use_embedding_sharing", "use_parallel_embedding"}) {
      fields.get(field);
    }
  };
  return family;
}();

}  // namespace kvzap::model
