// Flint: layers with windows between full ones, which have no RoPE; sinks, experts chosen by
// sigmoids.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family flint = [] {
  Family family;
  family.class_name = "FlintForCausalLM";
  family.model_type = "flint";
  family.tested = family_tests;
  family.default_key_value_heads = 4;
  family.default_head_dim = 128;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.qk_norm = QkNorm::head;
    config.has_sinks = true;
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
    const std::size_t last = config.layers.size() - 1;
    std::vector<bool> slides;
    for (std::size_t l = 0; l <= last; ++l) slides.push_back(l >= 2 && l % 4 != 1 && l != last);
    read_windows(fields, sliding_window_or(fields, 513), slides, config);
    for (LayerConfig& layer : config.layers) layer.has_rope = layer.window > 0;
    ExpertsConfig experts = read_experts(fields, "num_experts", 6, config);
    experts.intermediate_size = fields.find_size("moe_intermediate_size", max_size).value_or(512);
    experts.shared_intermediate_size =
        fields.find_size("shared_expert_intermediate_size", max_size).value_or(1024);
    experts.scores = ExpertsConfig::Scores::sigmoid;
    experts.normalises = fields.flag("norm_topk_prob", true);
    config.experts = experts;
    read_sparse_layers(fields, config, {0, 1});
  };
  family.tensors.sinks = "self_attn.softmax_offset";
  family.tensors.shared = "mlp.shared_expert";
  return family;
}();

}  // namespace kvzap::model
