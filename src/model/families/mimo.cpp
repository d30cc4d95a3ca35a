// MiMo-V2-Flash of Xiaomi: values of a smaller size than keys; layers with windows have twice the
// KV heads, and sinks.
#include <fmt/format.h>

#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

using nlohmann::json;

/// Published files have a number for each layer instead of a name.
void name_kinds(ConfigContent& content, const char* numbers, const char* field, const char* of_0,
                const char* of_1) {
  const auto found = content.find(numbers);
  if (found == content.end() || !found->is_array() || content.contains(field)) return;
  json names = json::array();
  for (const json& number : *found) {
    names.push_back(number == 0 ? json(of_0) : number == 1 ? json(of_1) : number);
  }
  content[field] = names;
  content.names_in_file[field] = numbers;
}

void read_value_size(ConfigFields& fields, ModelConfig& config) {
  constexpr const char* field = "v_head_dim";
  config.value_dim = fields.find_size(field, max_size).value_or(128);
  if (config.value_dim > config.head_dim) {
    fields.fail(field, fmt::format("at most head_dim ({})", config.head_dim),
                fmt::format("{}", config.value_dim));
  }
  constexpr const char* scale = "attention_value_scale";
  // A factor of all values, so one of attention's output.
  config.attention_out_multiplier =
      read_multiplier(fields, scale, fields.has_key(scale) ? 1 : 0.707);
}

/// Every sixth layer and the first one are full.
void read_mimo_windows(ConfigFields& fields, ModelConfig& config) {
  std::vector<bool> slides;
  for (std::size_t l = 0; l < config.layers.size(); ++l) slides.push_back(l > 0 && l % 6 != 5);
  const auto others = fields.find_size("sliding_window_size", max_size - 1);
  const std::int64_t window = sliding_window_or(fields, 129);
  read_windows(fields, others ? *others + 1 : window, slides, config);
  config.has_sinks = true;
  for (LayerConfig& layer : config.layers) {
    layer.has_sinks = layer.keeps_window = layer.window > 0;
    if (layer.window > 0) layer.kv_heads_factor = 2;
  }
  const std::int64_t kv_heads = 2 * config.num_key_value_heads;
  const bool has_windows = std::any_of(config.layers.begin(), config.layers.end(),
                                       [](const LayerConfig& layer) { return layer.window > 0; });
  if (has_windows && config.num_attention_heads % kv_heads != 0) {
    fields.fail(
        "num_key_value_heads",
        fmt::format("a divisor of half of num_attention_heads ({})", config.num_attention_heads),
        fmt::format("{}", config.num_key_value_heads));
  }
  fields.require("swa_num_attention_heads", config.num_attention_heads);
  fields.require("swa_num_key_value_heads", kv_heads);
  fields.require("swa_head_dim", config.head_dim);
  fields.require("swa_v_head_dim", config.value_dim);
  fields.require("add_swa_attention_sink_bias", true);
  fields.require("add_full_attention_sink_bias", false);
}

}  // namespace

const Family mimo_v2_flash = [] {
  Family family;
  family.class_name = "MiMoV2FlashForCausalLM";
  family.model_type = "mimo_v2_flash";
  family.tested = family_tests;
  family.default_key_value_heads = 4;
  family.default_head_dim = 192;
  family.default_norm_eps = 1e-5;
  family.rope.default_theta = 5e6;
  family.rope.default_rotary_factor = family.rope.default_window_factor = 0.334;
  family.rope.default_window_theta = 1e4;
  family.rename = [](ConfigContent& content) {
    rename_field(content, "layernorm_epsilon", "rms_norm_eps");
    rename_field(content, "swa_rope_theta", "rope_local_base_freq");
    name_kinds(content, "hybrid_layer_pattern", "layer_types", "full_attention",
               "sliding_attention");
    name_kinds(content, "moe_layer_freq", "mlp_layer_types", "dense", "sparse");
  };
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.qkv_bias = fields.flag("attention_bias", false);
    read_value_size(fields, config);
    read_mimo_windows(fields, config);
    GroupedExperts rules;
    rules.default_width = 2048;
    read_grouped_experts(fields, rules, config);
    fields.require_none("n_shared_experts");
    config.experts->shared_intermediate_size = 0;
    fields.require("scoring_func", "sigmoid");
    for (std::size_t l = 1; l < config.layers.size(); ++l) config.layers[l].has_experts = true;
    read_sparse_types(fields, config);
    for (const char* field : {"layernorm_epsilon", "swa_rope_theta", "hybrid_layer_pattern",
                              "moe_layer_freq", "topk_method", "attention_chunk_size"}) {
      fields.get(field);
    }
  };
  family.tensors.sinks = "self_attn.attention_sink_bias";
  return family;
}();

}  // namespace kvzap::model
