// EXAONE 4 and K-EXAONE of LG: layers with a window between full ones, which have no RoPE.
#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

void read_exaone(ConfigFields& fields, ModelConfig& config) {
  config.qk_norm = QkNorm::head;
  const std::int64_t window = sliding_window_or(fields, 4096);
  // A text such as "LLLG" needs layer_types. transformers writes 0 without a window.
  const nlohmann::json* const pattern = fields.get("sliding_window_pattern");
  std::int64_t interval = 4;
  const bool is_none = pattern == nullptr || (*pattern == 0 && window == 0);
  if (!is_none && !pattern->is_string()) {
    interval = fields.find_size("sliding_window_pattern", max_size).value_or(interval);
  } else if (!is_none && fields.get("layer_types") == nullptr) {
    fields.fail("sliding_window_pattern", "a number, as there are no layer_types",
                files::described(*pattern));
  }
  read_pattern_of_windows(fields, window, interval, config);
  for (LayerConfig& layer : config.layers) layer.has_rope = window == 0 || layer.window > 0;
}

}  // namespace

const Family exaone4 = [] {
  Family family;
  family.class_name = "Exaone4ForCausalLM";
  family.model_type = "exaone4";
  family.tested = family_tests;
  family.default_key_value_heads = 32;
  family.default_norm_eps = 1e-5;
  family.read = read_exaone;
  family.tensors.attention_in = "";
  family.tensors.attention_out = "post_attention_layernorm";
  family.tensors.feed_forward_in = "";
  family.tensors.feed_forward_out = "post_feedforward_layernorm";
  return family;
}();

const Family exaone_moe = [] {
  Family family;
  family.class_name = "ExaoneMoeForCausalLM";
  family.other_classes = {"ExaoneMoEForCausalLM"};
  family.model_type = "exaone_moe";
  family.tested = family_tests;
  family.default_key_value_heads = 32;
  family.default_norm_eps = 1e-5;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_exaone(fields, config);
    GroupedExperts rules;
    rules.count_field = "num_experts";
    rules.shared_field = "num_shared_experts";
    rules.default_width = 1024;
    rules.default_scale = 2.5;
    read_grouped_experts(fields, rules, config);
    read_leading_dense(fields, 1, config);
    read_sparse_types(fields, config);
    fields.get("num_nextn_predict_layers");  // for speculation; never part of the answer
  };
  family.tensors.correction = "mlp.e_score_correction_bias";
  return family;
}();

}  // namespace kvzap::model
