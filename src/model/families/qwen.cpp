// Qwen2, Qwen2.5 and Qwen3, dense and with experts.
#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

constexpr std::int64_t qwen_kv_heads = 32;

/// Layers from max_window_layers on have a window, unless layer_types says which do.
void read_qwen_window(ConfigFields& fields, ModelConfig& config) {
  constexpr std::int64_t default_window = 4096;
  constexpr double default_first_layer = 28;
  fields.get("sliding_window");
  const bool uses_window = fields.flag("use_sliding_window", false);
  const std::int64_t window = uses_window ? sliding_window_or(fields, default_window) : 0;
  const double first =
      fields.find_number("max_window_layers", 0, max_size).value_or(default_first_layer);
  std::vector<bool> slides;
  for (std::size_t l = 0; l < config.layers.size(); ++l) {
    slides.push_back(static_cast<double>(l) >= first);
  }
  read_windows(fields, window, slides, config);
}

/// The experts of qwen2_moe and qwen3_moe.
void read_qwen_moe(ConfigFields& fields, std::int64_t default_per_token, ModelConfig& config) {
  // transformers 5 writes qwen3_moe's number under the second name.
  const bool is_renamed =
      fields.get("num_experts") == nullptr && fields.has_key("num_local_experts");
  ExpertsConfig experts = read_experts(fields, is_renamed ? "num_local_experts" : "num_experts",
                                       default_per_token, config);
  experts.intermediate_size = fields.size("moe_intermediate_size", max_size);
  experts.normalises = fields.flag("norm_topk_prob", false);
  config.experts = experts;
  read_sparse_layers(fields, config);
}

}  // namespace

const Family qwen3 = [] {
  Family family;
  family.class_name = "Qwen3ForCausalLM";
  family.model_type = "qwen3";
  family.text_defaults =
      R"({"vocab_size":151936,"hidden_size":4096,"intermediate_size":22016,"num_hidden_layers":32,)"
      R"("num_attention_heads":32,"max_position_embeddings":32768})";
  family.text_types = {"qwen3_vl_text"};
  family.rope.has_image_sections = true;
  family.tested =
      "evicted pairs, logits and answers equal transformers 5.2 and kvpress 0.5.5 (demo model)";
  family.default_key_value_heads = qwen_kv_heads;
  family.default_head_dim = 128;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.qk_norm = QkNorm::head;
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
    ignore_bias(fields, "mlp_bias", config);
    read_qwen_window(fields, config);
  };
  return family;
}();

const Family qwen2 = [] {
  Family family;
  family.class_name = "Qwen2ForCausalLM";
  family.model_type = "qwen2";
  family.text_defaults =
      R"({"vocab_size":151936,"hidden_size":4096,"intermediate_size":22016,"num_hidden_layers":32,)"
      R"("num_attention_heads":32,"max_position_embeddings":32768})";
  family.text_types = {"qwen2_vl_text", "qwen2_5_vl_text", "qwen2_vl", "qwen2_5_vl"};
  family.rope.has_image_sections = true;
  family.tested =
      "evicted pairs, logits and answers equal transformers and kvpress (random weights)";
  family.default_key_value_heads = qwen_kv_heads;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    fields.flag("attention_bias", true);
    config.qkv_bias = true;
    ignore_bias(fields, "mlp_bias", config);
    read_qwen_window(fields, config);
  };
  return family;
}();

const Family qwen3_moe = [] {
  Family family;
  family.class_name = "Qwen3MoeForCausalLM";
  family.model_type = "qwen3_moe";
  family.text_types = {"qwen3_vl_moe_text"};
  family.rope.has_image_sections = true;
  family.tested = family_tests;
  family.default_key_value_heads = 4;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.qk_norm = QkNorm::head;
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
    ignore_bias(fields, "mlp_bias", config);
    // Unlike its dense sibling, every layer has the window.
    fields.get("sliding_window");
    const bool uses_window = fields.flag("use_sliding_window", false);
    set_window(fields, uses_window ? sliding_window_or(fields, 4096) : 0, config);
    read_qwen_moe(fields, 8, config);
  };
  return family;
}();

const Family qwen2_moe = [] {
  Family family;
  family.class_name = "Qwen2MoeForCausalLM";
  family.model_type = "qwen2_moe";
  family.tested = family_tests;
  family.default_key_value_heads = 16;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.qkv_bias = fields.flag("qkv_bias", true);
    ignore_bias(fields, "mlp_bias", config);
    read_qwen_window(fields, config);
    read_qwen_moe(fields, 4, config);
    config.experts->shared_intermediate_size =
        fields.find_size("shared_expert_intermediate_size", max_size).value_or(5632);
    config.experts->has_shared_gate = true;
  };
  family.tensors.shared = "mlp.shared_expert";
  return family;
}();

}  // namespace kvzap::model
