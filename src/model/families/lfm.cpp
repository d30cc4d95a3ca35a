// Liquid AI's LFM2 and LFM3: gated short convolutions in most layers, attention in the others; with
// experts or without.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

/// Names of files from before transformers had the class.
void rename_lfm(ConfigContent& content) {
  rename_field(content, "block_ff_dim", "intermediate_size");
  rename_field(content, "tie_embedding", "tie_word_embeddings");
}

/// Layers with attention are those of layer_types or, without this field, of full_attn_idxs.
/// Without either all layers have it.
void read_convolved_layers(ConfigFields& fields, ModelConfig& config) {
  const auto stated = read_layer_types(fields, "conv", config);
  constexpr const char* field = "full_attn_idxs";
  const nlohmann::json* const indices = fields.get(field);
  const auto count = static_cast<std::int64_t>(config.layers.size());
  const auto is_index = [&](const nlohmann::json& index) {
    return index.is_number_integer() && index >= 0 && index < count;
  };
  if (indices != nullptr &&
      (!indices->is_array() || !std::all_of(indices->begin(), indices->end(), is_index))) {
    fields.fail(field, fmt::format("an array of numbers of layers, 0 to {}", count - 1),
                files::described(*indices));
  }
  for (std::size_t l = 0; l < config.layers.size(); ++l) {
    const bool is_convolved =
        stated ? (*stated)[l]
               : indices != nullptr &&
                     std::find(indices->begin(), indices->end(), l) == indices->end();
    if (is_convolved) config.layers[l].mixing = TokenMixing::short_convolution;
  }
}

void read_convolution(ConfigFields& fields, std::int64_t default_kernel, ModelConfig& config) {
  ShortConvolutionConfig convolution;
  constexpr const char* field = "conv_L_cache";
  convolution.kernel = fields.find_size(field, DeltaNetConfig::max_kernel).value_or(default_kernel);
  if (convolution.kernel == 1) {
    fields.fail(field, "at least 2 tokens: the newest and one before it", "1");
  }
  convolution.has_bias = fields.flag("conv_bias", false);
  config.short_convolution = convolution;
}

/// Layers are convolutions, have a window, or are full.
void read_lfm3(ConfigFields& fields, ModelConfig& config) {
  constexpr const char* field = "layer_types";
  constexpr std::string_view convolved = "conv", sliding = "sliding_attention";
  config.qk_norm = QkNorm::head;
  config.gates_attention = config.gates_heads = fields.flag("use_attention_gate", true);
  config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
  config.norms_outputs = fields.flag("use_sandwich_norm", true);
  read_convolution(fields, 7, config);
  const std::vector<std::string> kinds = read_layer_kinds(fields, field, {}, config);
  const std::int64_t window = sliding_window_or(fields, 256);
  for (std::size_t l = 0; l < config.layers.size(); ++l) {
    std::string_view kind = l % 4 == 2 ? "full_attention" : convolved;
    if (l % 4 == 0 && l > 0) kind = sliding;
    if (!kinds.empty()) kind = kinds[l];
    if (kind == convolved) {
      config.layers[l].mixing = TokenMixing::short_convolution;
    } else if (kind == sliding) {
      if (window == 0) fields.fail("sliding_window", "a number, as layers slide", "none");
      config.layers[l].window = window;
    } else if (kind != "full_attention") {
      fields.fail(field, R"("conv", "sliding_attention" or "full_attention")",
                  files::in_quotes(std::string(kind)));
    }
  }
}

void read_lfm(ConfigFields& fields, ModelConfig& config) {
  config.qk_norm = QkNorm::head;
  read_convolution(fields, 3, config);
  read_convolved_layers(fields, config);
  // Of other programs; the classes of transformers do not read them.
  for (const char* other :
       {"block_dim", "block_ff_dim", "tie_embedding", "block_mlp_init_scale", "block_norm_eps",
        "block_out_init_scale", "block_use_swiglu", "block_use_xavier_init", "conv_dim",
        "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc", "theta"}) {
    fields.get(other);
  }
}

/// Sets the width of feed-forward parts, which the class derives from intermediate_size.
void adjust_width(ConfigFields& fields, ModelConfig& config) {
  const std::int64_t multiple = fields.find_size("block_multiple_of", max_size).value_or(256);
  const double factor = read_multiplier(fields, "block_ffn_dim_multiplier");
  if (!fields.flag("block_auto_adjust_ff_dim", true)) return;
  const auto width =
      static_cast<std::int64_t>(factor * static_cast<double>(2 * config.intermediate_size / 3));
  const std::int64_t adjusted = (width + multiple - 1) / multiple * multiple;
  if (adjusted < 1 || adjusted > max_size) {
    fields.fail("block_ffn_dim_multiplier",
                fmt::format("feed-forward parts of 1 to {} columns", max_size),
                fmt::format("{}", adjusted));
  }
  config.intermediate_size = adjusted;
}

Family lfm_family() {
  Family family;
  family.tested = family_tests;
  family.default_key_value_heads = 8;
  family.default_norm_eps = 1e-5;
  family.norm_eps_field = "norm_eps";
  family.ties_by_default = true;
  family.rope.default_theta = 1000000;
  family.rename = rename_lfm;
  family.tensors.final_norm = "model.embedding_norm";
  family.tensors.attention_in = "operator_norm";
  family.tensors.feed_forward_in = "ffn_norm";
  family.tensors.output = "self_attn.out_proj";
  family.tensors.q_norm = "self_attn.q_layernorm";
  family.tensors.k_norm = "self_attn.k_layernorm";
  family.tensors.feed_forward = "feed_forward";
  family.tensors.gate = "w1";
  family.tensors.up = "w3";
  family.tensors.down = "w2";
  family.tensors.router = "feed_forward.gate";
  family.tensors.correction = "feed_forward.expert_bias";
  family.tensors.expert_gate = "feed_forward.experts.{}.w1";
  family.tensors.expert_up = "feed_forward.experts.{}.w3";
  family.tensors.expert_down = "feed_forward.experts.{}.w2";
  return family;
}

}  // namespace

const Family lfm3 = [] {
  Family family = lfm_family();
  family.class_name = "Lfm3ForCausalLM";
  family.model_type = "lfm3";
  family.default_key_value_heads = 4;
  family.default_head_dim = 128;
  family.rope.default_window_theta = 10000;
  family.rope.default_turning_part = 0.5;
  family.rename = nullptr;
  family.read = read_lfm3;
  family.tensors.attention_out = "post_operator_norm";
  family.tensors.feed_forward_out = "post_ffn_norm";
  family.tensors.output = "self_attn.o_proj";
  family.tensors.q_norm = "self_attn.q_norm";
  family.tensors.k_norm = "self_attn.k_norm";
  family.tensors.attention_gate = "self_attn.gate_proj";
  return family;
}();

const Family lfm2 = [] {
  Family family = lfm_family();
  family.class_name = "Lfm2ForCausalLM";
  family.model_type = "lfm2";
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_lfm(fields, config);
    adjust_width(fields, config);
  };
  return family;
}();

const Family lfm2_moe = [] {
  Family family = lfm_family();
  family.class_name = "Lfm2MoeForCausalLM";
  family.model_type = "lfm2_moe";
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    if (fields.get("layer_types") == nullptr)
      fields.fail("layer_types", "an array of names", "none");
    read_lfm(fields, config);
    ExpertsConfig experts = read_experts(fields, "num_experts", 4, config);
    experts.intermediate_size = fields.find_size("moe_intermediate_size", max_size).value_or(1792);
    experts.scores = ExpertsConfig::Scores::sigmoid;
    experts.has_correction = fields.flag("use_expert_bias", true);
    experts.normalises = fields.flag("norm_topk_prob", true);
    experts.scale = read_multiplier(fields, "routed_scaling_factor");
    config.experts = experts;
    read_leading_dense(fields, 2, config, "num_dense_layers");
  };
  return family;
}();

}  // namespace kvzap::model
