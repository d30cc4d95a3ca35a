// Kolibri of Aleph Alpha: layers with a window between full ones, which have no RoPE, norms before
// and after each part, and experts that are chosen by logits and weighed by sigmoids.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family kolibri1 = [] {
  Family family;
  family.class_name = "Kolibri1ForCausalLM";
  family.model_type = "kolibri1";
  family.tested = family_tests;
  family.default_key_value_heads = 4;
  family.default_head_dim = 128;
  family.width_field = "moe_intermediate_size";
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    constexpr std::int64_t default_window = 513, pattern = 5;
    config.qk_norm = QkNorm::head;
    const std::int64_t window = sliding_window_or(fields, default_window);
    read_pattern_of_windows(fields, window, pattern, config);
    for (LayerConfig& layer : config.layers) layer.has_rope = window == 0 || layer.window > 0;
    const char* const count = fields.has_key("num_experts") ? "num_experts" : "num_local_experts";
    ExpertsConfig experts = read_experts(fields, count, 6, config);
    experts.scores = ExpertsConfig::Scores::sigmoid;
    experts.has_correction = experts.ranks_logits = true;
    experts.normalises = fields.flag("norm_topk_prob", false);
    experts.shared_intermediate_size =
        fields.find_size("shared_expert_intermediate_size", max_size).value_or(512);
    config.experts = experts;
    for (LayerConfig& layer : config.layers) layer.has_experts = true;
  };
  family.tensors.attention_out = "post_attn_norm";
  family.tensors.feed_forward_out = "post_ffn_norm";
  family.tensors.correction = "moe.router.expert_bias";
  return family;
}();

}  // namespace kvzap::model
