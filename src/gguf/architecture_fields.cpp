// Fields of config.json that not all architectures have: a function for each.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "gguf/config_values.hpp"
#include "gguf/tensor_names.hpp"

namespace kvzap::gguf {

using nlohmann::json;

namespace {

// Numbers of expert_gating_func.
constexpr std::int64_t gates_by_softmax = 1;
constexpr std::int64_t gates_by_sigmoid = 2;
constexpr std::int64_t gates_by_softmax_of_chosen = 3;

constexpr std::int64_t max_expert_count = 65536;

/// What a function of this file reads and fills.
struct Fields {
  ConfigValues& values;
  const ConfigSizes& sizes;
  json& config;
  ConfigBiases biases = {};

  bool has_in_first(const char* tensor) const {
    return values.has_tensor(name_in_layer(0, tensor));
  }
  void set_class(std::string_view class_name, std::string_view model_type) const {
    config["architectures"] = {class_name};
    config["model_type"] = model_type;
  }
};

/// attention_bias: biases on q, k and v, and on the output if `with_output`.
void add_attention_bias(Fields& fields, bool with_output) {
  fields.biases.qkv = fields.has_in_first("attn_q.bias");
  fields.biases.output = with_output && fields.biases.qkv;
  fields.config["attention_bias"] = fields.biases.qkv;
}

void add_mlp_bias(Fields& fields) {
  fields.biases.feed_forward = fields.has_in_first("ffn_gate.bias");
  fields.config["mlp_bias"] = fields.biases.feed_forward;
}

/// The number of experts, and of those that serve a token. The graph of an architecture fixes how a
/// router's logits become weights, whether or not the file says so.
void add_experts(Fields& fields, const char* count_field, std::int64_t gating) {
  const std::int64_t count = fields.values.integer("expert_count", 1, max_expert_count);
  fields.config[count_field] = count;
  fields.config["num_experts_per_tok"] = fields.values.integer("expert_used_count", 1, count);
  fields.values.require("expert_gating_func", gating);
}

std::int64_t width_of_experts(Fields& fields) {
  const auto width = fields.values.find_integer("expert_feed_forward_length", 1);
  if (width) return *width;
  const auto used = fields.config["num_experts_per_tok"].get<std::int64_t>();
  return std::max<std::int64_t>(1, fields.config["intermediate_size"].get<std::int64_t>() / used);
}

/// The experts of Qwen. Layers without a router are dense.
void add_qwen_experts(Fields& fields, bool normalises) {
  add_experts(fields, "num_experts", gates_by_softmax);
  fields.values.require("expert_weights_norm", normalises);
  fields.config["norm_topk_prob"] = normalises;
  fields.config["moe_intermediate_size"] = width_of_experts(fields);
  json dense = json::array();
  for (std::int64_t layer = 0; layer < fields.sizes.layers; ++layer) {
    const std::string router = name_in_layer(layer, "ffn_gate_inp.weight");
    if (!fields.values.has_tensor(router)) dense.push_back(layer);
  }
  fields.config["mlp_only_layers"] = std::move(dense);
}

/// partial_rotary_factor, the product of which with head_dim is rounded down.
void add_rotary_factor(Fields& fields) {
  const auto head_dim = static_cast<double>(fields.sizes.head_dim);
  double factor = static_cast<double>(fields.sizes.rotary_dim) / head_dim;
  if (static_cast<std::int64_t>(head_dim * factor) < fields.sizes.rotary_dim) {
    factor = std::nextafter(factor, 2.0);
  }
  fields.config["partial_rotary_factor"] = factor;
}

/// Returns for each layer whether it does not see the whole text. The file has a flag for each, or
/// the number of layers of which the last one is full.
std::vector<bool> reduced_layers(Fields& fields) {
  constexpr const char* key = "attention.sliding_window_pattern";
  if (fields.values.has_array(key)) return fields.values.flags(key, fields.sizes.blocks);
  const std::int64_t pattern =
      fields.values.find_integer(key, 0).value_or(fields.values.architecture().window_pattern);
  std::vector<bool> reduced;
  for (std::int64_t layer = 0; layer < fields.sizes.layers; ++layer) {
    reduced.push_back(pattern == 0 || (layer + 1) % pattern != 0);
  }
  return reduced;
}

/// Adds layer_types: layers are full or `reduced`.
void add_layer_types(Fields& fields, const char* reduced) {
  json types = json::array();
  for (const bool is_reduced : reduced_layers(fields)) {
    types.push_back(is_reduced ? reduced : "full_attention");
  }
  fields.config["layer_types"] = std::move(types);
}

/// no_rope_layers: 0 for each layer without RoPE, every `interval`-th one.
json flags_of_rope(const Fields& fields, std::int64_t interval) {
  json flags = json::array();
  for (std::int64_t layer = 0; layer < fields.sizes.layers; ++layer) {
    flags.push_back((layer + 1) % interval == 0 ? 0 : 1);
  }
  return flags;
}

/// Adds layer_types and the window, which is that of the file or `absent`. Returns the window; 0:
/// none.
std::int64_t add_windows(Fields& fields, std::int64_t absent) {
  const std::int64_t window =
      fields.values.find_integer("attention.sliding_window", 0).value_or(absent);
  if (window == 0) return 0;
  fields.config["sliding_window"] = window;
  add_layer_types(fields, "sliding_attention");
  return window;
}

void require_windows(const Fields& fields, std::int64_t window) {
  if (window > 0) return;
  fields.values.fail("attention.sliding_window", "a number of tokens above 0", "none");
}

/// RoPE of layers with a window is that of the others.
void refuse_window_rope(Fields& fields) {
  constexpr const char* key = "rope.freq_base_swa";
  const auto found = fields.values.find_number(key);
  const auto expected = fields.config["rope_theta"].get<double>();
  if (!found || *found == expected) return;
  fields.values.fail(key, fmt::format("{} as rope.freq_base", expected), fmt::format("{}", *found));
}

void add_gemma(Fields& fields) {
  json& config = fields.config;
  config["hidden_act"] = config["hidden_activation"] = "gelu_pytorch_tanh";
  config["query_pre_attn_scalar"] = fields.values.architecture().query_scalar(
      fields.sizes.layers, config["hidden_size"].get<std::int64_t>(),
      config["num_attention_heads"].get<std::int64_t>(), fields.sizes.head_dim);
}

void add_gemma2(Fields& fields) {
  constexpr std::int64_t absent_window = 4096;
  constexpr double absent_attention_cap = 50, absent_logits_cap = 30;
  add_gemma(fields);
  fields.config["attn_logit_softcapping"] =
      fields.values.factor("attn_logit_softcapping", absent_attention_cap);
  fields.config["final_logit_softcapping"] =
      fields.values.factor("final_logit_softcapping", absent_logits_cap);
  refuse_window_rope(fields);
  require_windows(fields, add_windows(fields, absent_window));
}

void add_gemma3(Fields& fields) {
  constexpr double absent_theta = 10000;
  add_gemma(fields);
  const double cap = fields.values.factor("final_logit_softcapping", 0);
  fields.config["final_logit_softcapping"] = cap > 0 ? json(cap) : json(nullptr);
  if (add_windows(fields, 0) == 0) {
    fields.config["sliding_window"] = nullptr;
    fields.config["layer_types"] =
        json(static_cast<std::size_t>(fields.sizes.layers), "full_attention");
    return;
  }
  const bool has_theta = fields.values.find_number("rope.freq_base_swa").has_value();
  fields.config["rope_local_base_freq"] =
      has_theta ? fields.values.positive("rope.freq_base_swa") : absent_theta;
}

void add_gpt_oss(Fields& fields) {
  json& config = fields.config;
  fields.biases = {true, true, false, true};
  config["attention_bias"] = true;
  add_experts(fields, "num_local_experts", gates_by_softmax_of_chosen);
  config["intermediate_size"] = fields.values.integer("expert_feed_forward_length", 1);
  refuse_window_rope(fields);
  require_windows(fields, add_windows(fields, 0));
  if (config.contains("rope_scaling")) return;
  config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", config["rope_theta"]}};
}

void add_cohere2(Fields& fields) {
  fields.config["logit_scale"] = fields.values.positive("logit_scale");
  require_windows(fields, add_windows(fields, 0));
}

/// The numbers that llama.cpp gives every such model.
void add_llama4(Fields& fields) {
  constexpr std::int64_t chunk = 8192, rope_interval = 4, experts_without_norm = 128;
  constexpr double scale = 0.1;
  json& config = fields.config;
  add_experts(fields, "num_local_experts", gates_by_sigmoid);
  config["intermediate_size_mlp"] = config["intermediate_size"];
  config["intermediate_size"] = fields.values.integer("expert_feed_forward_length", 1);
  config["interleave_moe_layer_step"] = fields.values.integer("interleave_moe_layer_step", 1);
  config["use_qk_norm"] = config["num_local_experts"] != experts_without_norm;
  const auto stated = fields.values.find_integer("attention.sliding_window", 0);
  if (stated == 0) {
    fields.values.fail("attention.sliding_window", "a number above 0, or none", "0");
  }
  config["attention_chunk_size"] = chunk;
  add_layer_types(fields, "chunked_attention");
  refuse_window_rope(fields);
  config["no_rope_layers"] = flags_of_rope(fields, rope_interval);
  config["attn_temperature_tuning"] = true;
  config["floor_scale"] = chunk;
  config["attn_scale"] = scale;
}

void add_llama(Fields& fields) {
  if (fields.values.find_integer("expert_count", 0).value_or(0) > 0) {
    fields.set_class("MixtralForCausalLM", "mixtral");
    add_experts(fields, "num_local_experts", gates_by_softmax);
    fields.values.require("expert_weights_norm", true);
    return;
  }
  add_attention_bias(fields, true);
  add_mlp_bias(fields);
}

void add_qwen2(Fields& fields) { fields.biases.qkv = true; }

void add_qwen3(Fields& fields) { add_attention_bias(fields, true); }

void add_qwen2moe(Fields& fields) {
  fields.biases.qkv = fields.has_in_first("attn_q.bias");
  fields.config["qkv_bias"] = fields.biases.qkv;
  add_qwen_experts(fields, false);
  fields.config["shared_expert_intermediate_size"] =
      fields.values.find_integer("expert_shared_feed_forward_length", 1)
          .value_or(fields.config["intermediate_size"].get<std::int64_t>());
}

void add_qwen3moe(Fields& fields) {
  add_attention_bias(fields, true);
  add_qwen_experts(fields, true);
}

void add_mistral3(Fields& fields) {
  json& config = fields.config;
  const double beta = fields.values.factor("attention.temperature_scale", 0);
  if (beta == 0 && !config.contains("rope_scaling")) {
    fields.set_class("MistralForCausalLM", "mistral");
    config["sliding_window"] = nullptr;
    return;
  }
  json rope = config.value("rope_scaling", json{{"rope_type", "default"}});
  config.erase("rope_scaling");
  rope["rope_theta"] = config["rope_theta"];
  if (beta != 0) {
    const std::int64_t original =
        fields.values.find_integer("rope.scaling.original_context_length", 2)
            .value_or(fields.sizes.context);
    rope["llama_4_scaling_beta"] = beta;
    rope["original_max_position_embeddings"] = original;
    fields.values.require("attention.temperature_length", original);
  }
  config["rope_parameters"] = std::move(rope);
}

void add_minimax_m2(Fields& fields) {
  add_experts(fields, "num_local_experts", gates_by_sigmoid);
  fields.values.integer("expert_gating_func", gates_by_sigmoid, gates_by_sigmoid);
  fields.values.require("expert_weights_norm", true);
  fields.values.require("expert_feed_forward_length",
                        fields.config["intermediate_size"].get<std::int64_t>());
  fields.config["rotary_dim"] = fields.sizes.rotary_dim;
  add_rotary_factor(fields);
}

void add_smollm3(Fields& fields) {
  add_attention_bias(fields, true);
  add_mlp_bias(fields);
  constexpr std::int64_t interval = 4;  // of the only published model
  fields.config["no_rope_layers"] = flags_of_rope(fields, interval);
  fields.config["no_rope_layer_interval"] = interval;
}

void add_olmo2(Fields& fields) {
  add_attention_bias(fields, true);
  if (add_windows(fields, 0) == 0) return;
  fields.set_class("Olmo3ForCausalLM", "olmo3");
}

void add_phi3(Fields& fields) {
  add_rotary_factor(fields);
  const auto window = fields.values.find_integer("attention.sliding_window", 0).value_or(0);
  fields.config["sliding_window"] = window > 0 ? json(window) : json(nullptr);
}

void add_granite(Fields& fields) {
  add_attention_bias(fields, true);
  add_mlp_bias(fields);
  // Files of hybrid models use this key to say that no layer has RoPE.
  fields.values.require("rope.scaling.finetuned", true);
  fields.config["embedding_multiplier"] = fields.values.factor("embedding_scale", 1);
  fields.config["residual_multiplier"] = fields.values.factor("residual_scale", 1);
  fields.config["logits_scaling"] = fields.values.positive("logit_scale");
  fields.config["attention_multiplier"] = fields.values.factor(
      "attention.scale", 1 / std::sqrt(static_cast<double>(fields.sizes.head_dim)));
}

void add_glm4(Fields& fields) {
  add_attention_bias(fields, false);
  add_rotary_factor(fields);
}

void add_glm4moe(Fields& fields) {
  add_glm4(fields);
  fields.config["use_qk_norm"] = fields.has_in_first("attn_q_norm.weight");
  add_experts(fields, "n_routed_experts", gates_by_sigmoid);
  const auto count = fields.config["n_routed_experts"].get<std::int64_t>();
  fields.config["moe_intermediate_size"] = width_of_experts(fields);
  fields.config["n_shared_experts"] = fields.values.integer("expert_shared_count", 1, count);
  fields.config["first_k_dense_replace"] =
      fields.values.find_integer("leading_dense_block_count", 0).value_or(0);
  fields.config["norm_topk_prob"] = fields.values.find_flag("expert_weights_norm").value_or(false);
  fields.config["routed_scaling_factor"] = fields.values.factor("expert_weights_scale", 1);
  const std::int64_t groups =
      fields.values.find_integer("expert_group_count", 0, count).value_or(0);
  fields.config["n_group"] = std::max<std::int64_t>(groups, 1);
  const auto used = fields.values.find_integer("expert_group_used_count", 0, count).value_or(0);
  fields.config["topk_group"] = std::max<std::int64_t>(used, 1);
}

/// The layers with a delta net: those with a flag, or all but every interval-th one.
void add_hybrid_layers(Fields& fields) {
  constexpr const char* key = "attention.recurrent_layers";
  constexpr std::int64_t absent_interval = 4;
  const std::int64_t interval =
      fields.values.find_integer("full_attention_interval", 1).value_or(absent_interval);
  std::vector<bool> has_delta_net;
  if (fields.values.has_array(key)) has_delta_net = fields.values.flags(key, fields.sizes.blocks);
  json types = json::array();
  for (std::int64_t layer = 0; layer < fields.sizes.layers; ++layer) {
    const bool is_linear = has_delta_net.empty() ? (layer + 1) % interval != 0
                                                 : has_delta_net[static_cast<std::size_t>(layer)];
    types.push_back(is_linear ? "linear_attention" : "full_attention");
  }
  fields.config["layer_types"] = std::move(types);
}

void add_hybrid(Fields& fields) {
  json& config = fields.config;
  config["attention_bias"] = false;
  add_rotary_factor(fields);
  add_hybrid_layers(fields);
  const std::int64_t heads = fields.values.integer("ssm.time_step_rank", 1);
  const std::int64_t values = fields.values.integer("ssm.inner_size", 1);
  if (values % heads != 0) {
    fields.values.fail("ssm.inner_size",
                       fmt::format("a multiple of ssm.time_step_rank ({})", heads),
                       fmt::format("{}", values));
  }
  config["linear_num_value_heads"] = heads;
  config["linear_value_head_dim"] = values / heads;
  config["linear_num_key_heads"] = fields.values.integer("ssm.group_count", 1);
  config["linear_key_head_dim"] = fields.values.integer("ssm.state_size", 1);
  config["linear_conv_kernel_dim"] = fields.values.integer("ssm.conv_kernel", 1);
}

void add_hybrid_experts(Fields& fields) {
  add_experts(fields, "num_experts", gates_by_softmax);
  fields.values.require("expert_weights_norm", true);
  json& config = fields.config;
  const auto width = config.value("intermediate_size", std::int64_t{0});
  const auto shared = fields.values.find_integer("expert_shared_feed_forward_length", 1);
  config["moe_intermediate_size"] =
      width > 0 ? width_of_experts(fields) : fields.values.integer("expert_feed_forward_length", 1);
  config["shared_expert_intermediate_size"] =
      shared || width == 0 ? shared.value_or(config["moe_intermediate_size"].get<std::int64_t>())
                           : width;
}

void add_qwen3next(Fields& fields) {
  add_hybrid(fields);
  add_hybrid_experts(fields);
  fields.config["norm_topk_prob"] = true;
}

/// The pairs of dimensions that turn with each axis of an image; the fourth axis is unused.
void add_image_sections(Fields& fields) {
  constexpr std::int64_t axes = 4;
  const auto sections = fields.values.find_integers("rope.dimension_sections", axes);
  json& config = fields.config;
  json rope = config.value("rope_scaling", json{{"rope_type", "default"}});
  config.erase("rope_scaling");
  rope["rope_theta"] = config["rope_theta"];
  rope["partial_rotary_factor"] = config["partial_rotary_factor"];
  if (sections) {
    rope["mrope_section"] = {(*sections)[0], (*sections)[1], (*sections)[2]};
    rope["mrope_interleaved"] = true;
  }
  config["rope_parameters"] = std::move(rope);
}

void add_qwen35(Fields& fields) {
  add_hybrid(fields);
  add_image_sections(fields);
}

void add_qwen35moe(Fields& fields) {
  add_qwen35(fields);
  add_hybrid_experts(fields);
}

}  // namespace

ConfigBiases add_architecture_fields(ConfigValues& values, const ConfigSizes& sizes, json& config) {
  constexpr std::pair<std::string_view, void (*)(Fields&)> functions[] = {
      {"llama", add_llama},         {"qwen2", add_qwen2},       {"qwen3", add_qwen3},
      {"qwen2moe", add_qwen2moe},   {"qwen3moe", add_qwen3moe}, {"mistral3", add_mistral3},
      {"olmo2", add_olmo2},         {"smollm3", add_smollm3},   {"minimax-m2", add_minimax_m2},
      {"phi3", add_phi3},           {"granite", add_granite},   {"glm4", add_glm4},
      {"glm4moe", add_glm4moe},     {"gemma2", add_gemma2},     {"gemma3", add_gemma3},
      {"gpt-oss", add_gpt_oss},     {"cohere2", add_cohere2},   {"llama4", add_llama4},
      {"qwen3next", add_qwen3next}, {"qwen35", add_qwen35},     {"qwen35moe", add_qwen35moe}};
  Fields fields{values, sizes, config};
  for (const auto& [name, add] : functions) {
    if (name == values.architecture().name) add(fields);
  }
  return fields.biases;
}

}  // namespace kvzap::gguf
