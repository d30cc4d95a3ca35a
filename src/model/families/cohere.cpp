// Cohere's Command R, Command R7B and Command A: attention and feed-forward part read the same
// LayerNorm. In the later ones only layers with a window have RoPE.
#include "model/families/families.hpp"

namespace kvzap::model {

namespace {

Family cohere_family() {
  Family family;
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.norm_eps_field = "layer_norm_eps";
  family.ties_by_default = true;
  family.rope.is_interleaved = true;
  family.tensors.feed_forward_in = "";
  return family;
}

void read_cohere(ConfigFields& fields, ModelConfig& config) {
  config.norm_type = NormType::layer;
  config.is_parallel = config.shares_norm = true;
  config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
  config.logits_divisor = 1 / read_multiplier(fields, "logit_scale", 0.0625);
}

/// Experts of the width intermediate_size; dense layers have their own width.
void read_cohere_experts(ConfigFields& fields, ModelConfig& config) {
  constexpr const char* shared_field = "num_shared_experts";
  ExpertsConfig experts = read_experts(fields, "num_experts", 2, config);
  const std::string scores = fields.find_text("expert_selection_fn").value_or("softmax");
  if (scores != "softmax") {
    fields.require("expert_selection_fn", "sigmoid");
    experts.scores = ExpertsConfig::Scores::sigmoid;
  }
  experts.normalises = fields.flag("norm_topk_prob", true) || scores == "softmax";
  const nlohmann::json* const shared = fields.get(shared_field);
  const auto combination = fields.find_text("shared_expert_combination_strategy");
  if (shared != nullptr && *shared != 0) {
    read_shared_width(fields, shared_field, 0, experts);
    experts.averages_shared = combination.value_or("average") != "sum";
    if (experts.averages_shared) {
      fields.require("shared_expert_combination_strategy", "average");
    }
  }
  config.experts = experts;
  if (const auto dense = fields.find_size("prefix_dense_intermediate_size", max_size)) {
    config.intermediate_size = *dense;
  }
}

/// The first layers may be dense, with a pattern of windows and RoPE of their own.
void read_cohere_layers(ConfigFields& fields, ModelConfig& config) {
  const std::int64_t first =
      fields.find_size("prefix_dense_sliding_window_pattern", max_size).value_or(1);
  const std::int64_t pattern = fields.find_size("sliding_window_pattern", max_size).value_or(4);
  read_leading_dense(fields, 0, config);
  std::vector<bool> slides;
  std::int64_t dense = 0;
  for (const LayerConfig& layer : config.layers) {
    const auto place = static_cast<std::int64_t>(slides.size()) - dense;
    slides.push_back(layer.has_experts ? (place + 1) % pattern != 0 : ++dense % first != 0);
  }
  read_windows(fields, sliding_window_or(fields, 4096), slides, config);
  read_sparse_types(fields, config);
  for (LayerConfig& layer : config.layers) {
    layer.has_rope = layer.window > 0 || (!layer.has_experts && first == 1);
  }
}

}  // namespace

const Family cohere2 = [] {
  Family family = cohere_family();
  family.class_name = "Cohere2ForCausalLM";
  family.model_type = "cohere2";
  family.text_defaults =
      R"({"vocab_size":256000,"hidden_size":8192,"intermediate_size":22528,"num_hidden_layers":40,)"
      R"("num_attention_heads":64,"max_position_embeddings":8192})";
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_cohere(fields, config);
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

const Family cohere = [] {
  Family family = cohere_family();
  family.class_name = "CohereForCausalLM";
  family.model_type = "cohere";
  family.rope.default_theta = 500000;
  family.tensors.head_norms_are_matrix = true;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_cohere(fields, config);
    if (fields.flag("use_qk_norm", false)) config.qk_norm = QkNorm::layer_of_head;
  };
  return family;
}();

const Family cohere2_moe = [] {
  Family family = cohere_family();
  family.class_name = "Cohere2MoeForCausalLM";
  family.model_type = "cohere2_moe";
  family.default_head_dim = 128;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_cohere(fields, config);
    constexpr double smallest_eps = 1e-30;
    if (const auto eps = fields.find_number("rms_norm_eps", smallest_eps, 1)) {
      config.norm_type = NormType::rms;
      config.rms_norm_eps = *eps;
    }
    read_cohere_experts(fields, config);
    read_cohere_layers(fields, config);
  };
  return family;
}();

}  // namespace kvzap::model
