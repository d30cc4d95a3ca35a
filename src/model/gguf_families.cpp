// The rows of each family in GGUF files. A row is a call of GgufFields that reads and writes; code
// beside rows computes values that no key holds in the form of config.json.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "gguf/tensor_names.hpp"
#include "model/gguf_gemma.hpp"
#include "model/gguf_latent.hpp"
#include "model/gguf_rows.hpp"

namespace kvzap::model {

using nlohmann::json;

namespace {

constexpr const char* logits_cap = "final_logit_softcapping";

void mixtral_rows(GgufFields& f) {
  experts(f, "num_local_experts", softmax, dense_width);
  f.require_key("expert_weights_norm", true);
}

void qwen2moe_rows(GgufFields& f) {
  attention_bias(f, false, "qkv_bias");
  qwen_experts(f, false);
  shared_width(f);
}

void qwen3moe_rows(GgufFields& f) {
  attention_bias(f, true);
  qwen_experts(f, true);
}

void minimax_m2_rows(GgufFields& f) {
  experts(f, "num_local_experts", sigmoid, dense_width);
  f.require_key(width_key, f.config["intermediate_size"]);
  f.whole("expert_gating_func", sigmoid, sigmoid);  // must be there
  f.require_key("expert_weights_norm", true);
  f.config["rotary_dim"] = f.rotary_dim;
  rotary_factor(f);
}

void smollm3_rows(GgufFields& f) {
  constexpr std::int64_t interval = 4;  // of the only published model
  all_biases(f);
  rope_layers(f, interval);
  f.config["no_rope_layer_interval"] = interval;
}

void olmo2_rows(GgufFields& f) {
  require_scaling_by_keys(f, true);
  attention_bias(f, true);
}

/// Files have one base of RoPE for all layers.
void olmo3_rows(GgufFields& f) {
  olmo2_rows(f);
  windows(f);
  f.require(f.model.window_rope_theta.value_or(f.model.rope_theta) == f.model.rope_theta,
            "rope_parameters.sliding_attention.rope_theta", "that of full_attention",
            "another number");
}

void phi3_rows(GgufFields& f) {
  rotary_factor(f);
  // llama.cpp takes Phi-4 from a window of 0.
  f.integer_or(window_key, "sliding_window", 0, f.model.layer(0).window);
  json& window = f.config["sliding_window"];
  if (window == 0) window = nullptr;
}

void granite_rows(GgufFields& f) {
  all_biases(f);
  // Files of hybrid models use this key to say that no layer has RoPE.
  f.require_key("rope.scaling.finetuned", true);
  granite_factors(f);
}

void granitemoe_rows(GgufFields& f) {
  granite_rows(f);
  f.demand("mlp_bias", false, f.mlp_bias);
  f.config.erase("mlp_bias");
  experts(f, "num_local_experts", softmax, only_width);
  f.require_key("expert_weights_norm", true);
}

void granitemoeshared_rows(GgufFields& f) {
  granitemoe_rows(f);
  f.integer(shared_width_key, "shared_intermediate_size",
            f.model.experts->shared_intermediate_size);
}

void glm4_rows(GgufFields& f) {
  attention_bias(f, false);
  rotary_factor(f);
}

void dots1_rows(GgufFields& f) {
  no_attention_bias(f);
  f.demand("n_group", 1, f.model.experts->groups);
  f.config["sliding_window"] = nullptr;
  grouped_experts(f, sigmoid);
}

void glm4moe_rows(GgufFields& f) {
  glm4_rows(f);
  f.config["use_qk_norm"] = f.has_in_layers("attn_q_norm.weight");
  grouped_experts(f, sigmoid);
  expert_groups(f);
}

void gemma_rows(GgufFields& f) {
  constexpr double tolerance = 1e-6;
  f.config["hidden_act"] = f.config["hidden_activation"] = "gelu_pytorch_tanh";
  no_attention_bias(f);
  const std::int64_t scalar = f.architecture.query_scalar(
      f.layers, f.size("hidden_size"), f.size("num_attention_heads"), f.head_dim);
  const double found = 1 / (*f.model.attention_multiplier * *f.model.attention_multiplier);
  f.require(std::abs(found / static_cast<double>(scalar) - 1) < tolerance, "query_pre_attn_scalar",
            fmt::format("{}", scalar), fmt::format("{:.6g}", found));
  f.config["query_pre_attn_scalar"] = scalar;
}

void gemma2_rows(GgufFields& f) {
  constexpr std::int64_t absent_window = 4096;
  gemma_rows(f);
  require_scaling_by_keys(f, true);
  const auto cap = [&](const char* key, double absent, double value) {
    f.require(value > 0, key, "a number above 0", "none");
    f.factor(key, key, absent, value);
  };
  cap("attn_logit_softcapping", 50, f.model.attention_soft_cap);
  cap(logits_cap, 30, f.model.logits_soft_cap);
  tied_head(f);
  one_rope(f);
  windows(f, absent_window);
}

void gemma3_rows(GgufFields& f) {
  constexpr double absent_theta = 10000;
  gemma_rows(f);
  require_scaling_by_keys(f, false);
  const double cap = f.find_factor(logits_cap, 0);
  f.config[logits_cap] = cap > 0 ? json(cap) : json(nullptr);
  if (f.model.logits_soft_cap > 0) f.add(logits_cap, f.model.logits_soft_cap);
  if (window_of(f, 0) == 0) {
    f.config["sliding_window"] = nullptr;
    f.config["layer_types"] = json(static_cast<std::size_t>(f.layers), "full_attention");
    return;
  }
  windows(f);
  f.positive(window_theta_key, "rope_local_base_freq",
             f.model.window_rope_theta.value_or(f.model.rope_theta), absent_theta);
}

void gpt_oss_rows(GgufFields& f) {
  f.qkv_bias = f.output_bias = f.expert_biases = true;
  f.config["attention_bias"] = true;
  f.demand("swiglu_limit", 7.0, f.model.gate_limit);
  f.demand("tie_word_embeddings", false, f.model.tie_word_embeddings);
  require_scaling_by_keys(f, true);
  experts(f, "num_local_experts", softmax_of_chosen, only_width);
  one_rope(f);
  windows(f);
  if (!f.config.contains("rope_scaling")) rope_parameters(f);
}

void cohere2_rows(GgufFields& f) {
  no_attention_bias(f);
  tied_head(f);
  f.positive("logit_scale", "logit_scale", 1 / f.model.logits_divisor);
  windows(f);
}

/// The numbers that llama.cpp gives every such model.
void llama4_rows(GgufFields& f) {
  constexpr std::int64_t chunk = 8192, rope_interval = 4, experts_without_norm = 128;
  constexpr const char* step_key = "interleave_moe_layer_step";
  f.config["intermediate_size_mlp"] = f.config["intermediate_size"];
  experts(f, "num_local_experts", sigmoid, only_width);
  const bool has_norm = f.size("num_local_experts") != experts_without_norm;
  f.require((f.model.qk_norm == QkNorm::unit) == has_norm, "use_qk_norm",
            fmt::format("{} for {} experts", has_norm, f.model.experts->count),
            fmt::format("{}", !has_norm));
  f.config["use_qk_norm"] = has_norm;
  const QueryScaling scaling = f.model.query_scaling.value_or(QueryScaling());
  f.implied("attn_temperature_tuning", true, f.model.query_scaling.has_value());
  f.implied("attn_scale", 0.1, scaling.beta);
  f.implied("floor_scale", chunk, scaling.length);
  rope_layers(f, rope_interval);
  for (const LayerConfig& layer : f.model.layers) {
    if (layer.chunk != 0) f.demand("attention_chunk_size", chunk, layer.chunk);
  }
  f.config["attention_chunk_size"] = chunk;
  // Every step-th layer has experts.
  const std::int64_t first = leading_dense_layers(f.model);
  const std::int64_t step = first == f.model.num_hidden_layers ? 0 : first + 1;
  for (std::int64_t l = 0; !f.reads() && l < f.layers; ++l) {
    const bool expected = ends_period(l, step);
    if (f.model.layer(l).has_experts == expected) continue;
    f.fail("moe_layers",
           fmt::format("every {}-th layer from the first one, layer {}", step, step - 1),
           fmt::format("layer {} {}", l, expected ? "without experts" : "with experts"));
  }
  f.integer(step_key, step_key, step > 0 ? step : f.layers + 1);
  if (f.find_integer(window_key, 0) == 0) {
    f.fail_key(window_key, "a number above 0, or none", "0");
  }
  one_rope(f);
  pattern_of_layers(f, "chunked_attention");
}

/// The layers with a delta net: those with a flag, or all but every interval-th one. Older programs
/// do not know the flags.
void hybrid_layers(GgufFields& f) {
  constexpr const char* flags_key = "attention.recurrent_layers";
  constexpr const char* interval_key = "full_attention_interval";
  const auto flags = f.find_flags(flags_key);
  std::int64_t interval = f.find_integer(interval_key, 1).value_or(4);
  if (!f.reads()) {
    interval = 1;  // layers + 1: no layer has attention
    while (interval <= f.layers && f.model.layer(interval - 1).mixing == TokenMixing::delta_net)
      ++interval;
  }
  std::vector<bool> in_model;
  json types = json::array();
  bool is_periodic = true;
  for (std::int64_t l = 0; l < f.layers; ++l) {
    const bool is_full = flags ? !(*flags)[static_cast<std::size_t>(l)] : ends_period(l, interval);
    types.push_back(is_full ? "full_attention" : "linear_attention");
    in_model.push_back(f.model.layer(l).mixing == TokenMixing::delta_net);
    is_periodic = is_periodic && in_model.back() != is_full;
  }
  f.config["layer_types"] = std::move(types);
  f.add(interval_key, interval);
  if (!is_periodic) f.add(flags_key, in_model);
}

void hybrid_rows(GgufFields& f) {
  const DeltaNetConfig& net = *f.model.delta_net;
  f.config["attention_bias"] = false;
  no_attention_bias(f);
  require_scaling_by_keys(f, true);
  rotary_factor(f);
  f.require(net.value_dim == net.key_dim, "linear_value_head_dim",
            fmt::format("{} as linear_key_head_dim", net.key_dim),
            fmt::format("{}", net.value_dim));
  f.integer("ssm.conv_kernel", "linear_conv_kernel_dim", net.kernel);
  f.integer("ssm.state_size", "linear_key_head_dim", net.key_dim);
  f.integer("ssm.group_count", "linear_num_key_heads", net.key_heads);
  f.integer("ssm.time_step_rank", "linear_num_value_heads", net.value_heads);
  f.integer("ssm.inner_size", "linear_value_head_dim", net.value_heads * net.value_dim);
  const std::int64_t heads = f.size("linear_num_value_heads");
  const std::int64_t values = f.size("linear_value_head_dim");
  if (values % heads != 0) {
    f.fail_key("ssm.inner_size", fmt::format("a multiple of ssm.time_step_rank ({})", heads),
               fmt::format("{}", values));
  }
  f.config["linear_value_head_dim"] = values / heads;
  hybrid_layers(f);
}

void hybrid_experts(GgufFields& f) {
  normalised(f, true);
  for (std::int64_t l = 0; l < f.layers; ++l) {
    f.require(f.model.layer(l).has_experts, "mlp_only_layers",
              fmt::format("experts in layer {}", l), "none");
  }
  experts(f, "num_experts", softmax, own_width);
  shared_width(f);
}

void qwen3next_rows(GgufFields& f) {
  hybrid_rows(f);
  hybrid_experts(f);
  f.config["norm_topk_prob"] = true;
}

/// With the pairs of dimensions that turn with each axis of an image, which programs need for
/// texts, too; the fourth axis is unused. Pairs take the axes in turns. llama.cpp does not rotate a
/// pair beyond its axis' number.
void qwen35_rows(GgufFields& f) {
  constexpr const char* key = "rope.dimension_sections";
  hybrid_rows(f);
  json& rope = rope_parameters(f);
  rope["partial_rotary_factor"] = f.config["partial_rotary_factor"];
  if (const auto axes = f.metadata().find_integers(f.read(key), 4, 0, GgufFields::max_extent)) {
    rope["mrope_section"] = {(*axes)[0], (*axes)[1], (*axes)[2]};
    rope["mrope_interleaved"] = true;
  }
  std::vector<std::int64_t> axes = f.model.image_sections;
  if (axes.empty()) axes = {11, 11, 10};  // transformers' default
  const std::int64_t sum = axes[0] + axes[1] + axes[2];
  for (std::int64_t pair = 0; pair < f.model.rotated_dims() / 2; ++pair) {
    const std::int64_t place = sum == 0 ? 0 : pair % sum;
    f.require(place < 3 * axes[static_cast<std::size_t>(place % 3)],
              "rope_parameters.mrope_section", "three almost equal numbers",
              fmt::format("{}, {} and {}", axes[0], axes[1], axes[2]));
  }
  axes.push_back(0);
  f.add(key, axes);
}

/// llama.cpp gives models of 64 layers alone a window.
void exaone4_rows(GgufFields& f) {
  constexpr std::int64_t layers_with_windows = 64, absent_window = 4096;
  require_scaling_by_keys(f, false);
  if (f.layers == layers_with_windows) return windows(f, absent_window);
  f.require(window_of(f, 0) == 0, "sliding_window", "null, as there are not 64 layers", "a number");
  f.config["sliding_window"] = nullptr;
}

/// The width of the shared expert, which these files have beside the number of such experts.
void repeated_shared_width(GgufFields& f) {
  f.find_integer(shared_width_key, 0);
  f.add(shared_width_key, f.model.experts->shared_intermediate_size);
}

/// Layers with a window alone have RoPE.
void exaone_moe_rows(GgufFields& f) {
  GroupedFields names;
  names.count = "num_experts";
  names.shared = "num_shared_experts";
  require_scaling_by_keys(f, false);
  one_rope(f);
  windows(f);
  grouped_experts(f, sigmoid, names);
  repeated_shared_width(f);
  f.config["n_group"] = f.config["topk_group"] = 1;
  f.demand("n_group", 1, f.model.experts->groups);
}

/// llama.cpp gives every fourth layer no RoPE, whatever the windows.
void afmoe_rows(GgufFields& f) {
  constexpr std::int64_t period = 4;
  GroupedFields names;
  names.count = "num_experts";
  names.shared = "num_shared_experts";
  names.scale = "route_scale";
  names.normalises = "route_norm";
  names.leading = "num_dense_layers";
  one_rope(f);
  windows(f);
  for (std::int64_t l = 0; !f.reads() && l < f.layers; ++l) {
    f.require(f.model.layer(l).has_rope != ends_period(l, period), "global_attn_every_n_layers",
              "4", "another number");
  }
  grouped_experts(f, sigmoid, names);
  f.implied("mup_enabled", true, f.model.embedding_multiplier != 1);
}

void hy_v3_rows(GgufFields& f) {
  GroupedFields names;
  names.count = "num_experts";
  names.shared = "num_shared_experts";
  names.scale = "router_scaling_factor";
  no_attention_bias(f);
  grouped_experts(f, sigmoid, names);
  repeated_shared_width(f);
}

void bitnet_rows(GgufFields& f) {
  no_attention_bias(f);
  tied_head(f);
  f.require(f.model.activation == Activation::silu, "hidden_act", "silu", "another one");
}

/// Activations have parameters of each layer: metadata in files, tensors in checkpoints.
void apertus_rows(GgufFields& f) {
  attention_bias(f, true);
  f.config["hidden_act"] = "xielu";
  f.demand("tie_word_embeddings", false, f.model.tie_word_embeddings);
  if (f.reads() && !f.config.contains("rope_scaling")) rope_parameters(f);
  for (const char* name : {"alpha_n", "alpha_p", "beta", "eps"}) {
    const std::string key = std::string("xielu.") + name;
    const auto count = static_cast<std::uint64_t>(f.blocks);
    if (f.reads() && !f.metadata().find_floats(key, count)) {
      f.metadata().fail(key, "a number for each layer", "none");
    }
  }
}

/// Feed-forward parts without a gate, and biases of all maps.
void no_gate(GgufFields& f, const char* activation, const char* bias_field, Activation expected) {
  f.require(f.model.activation == expected, "hidden_act", activation, "another one");
  f.config["hidden_act"] = activation;
  f.config[bias_field] = f.mlp_bias = f.has_in_layers("ffn_up.bias");
}

void rows_without_gate(GgufFields& f) {
  attention_bias(f, true);
  no_gate(f, "relu2", "mlp_bias", Activation::relu2);
}

void arcee_rows(GgufFields& f) {
  rows_without_gate(f);
  // llama.cpp refuses a file with them.
  no_attention_bias(f);
  f.demand("mlp_bias", false, f.model.mlp_bias);
}

void nemotron_rows(GgufFields& f) {
  f.norm_bias = true;
  rows_without_gate(f);
  rotary_factor(f);
}

/// Learned embeddings of positions.
void gpt2_rows(GgufFields& f) {
  f.norm_bias = f.qkv_bias = f.output_bias = f.mlp_bias = f.has_positions = true;
  f.require(f.model.activation == Activation::gelu_tanh, "activation_function", "gelu_new",
            "another one");
  f.config["activation_function"] = "gelu_new";
  for (const char* field : {"hidden_act", "rope_theta"}) f.config.erase(field);
}

void starcoder_rows(GgufFields& f) {
  gpt2_rows(f);
  f.config["multi_query"] = true;
}

void starcoder2_rows(GgufFields& f) {
  f.norm_bias = true;
  no_gate(f, "gelu_pytorch_tanh", "use_bias", Activation::gelu_tanh);
  f.qkv_bias = f.output_bias = f.mlp_bias;
  f.config["sliding_window"] = nullptr;
}

/// Norms of heads have no place in the file.
void no_head_norms(GgufFields& f) {
  f.demand("qk_layernorm", false, f.model.qk_norm != QkNorm::none);
}

void phi2_rows(GgufFields& f) {
  no_head_norms(f);
  f.norm_bias = f.head_bias = f.qkv_bias = f.output_bias = true;
  no_gate(f, "gelu_new", "mlp_bias", Activation::gelu_tanh);
  f.config.erase("mlp_bias");
  f.mlp_bias = true;
  rotary_factor(f);
}

void gptneox_rows(GgufFields& f) {
  f.norm_bias = true;
  no_gate(f, "gelu", "attention_bias", Activation::gelu);
  f.mlp_bias = true;
  f.qkv_bias = f.output_bias = f.has_in_layers("attn_qkv.bias");
  f.config["attention_bias"] = f.qkv_bias;
  rotary_factor(f);
  f.flag("use_parallel_residual", "use_parallel_residual", f.model.is_parallel);
}

/// One norm of two parallel parts is that of the older decoder, with one KV head.
void falcon_rows(GgufFields& f) {
  const bool has_two_norms = f.has_in_layers("attn_norm_2.weight");
  f.norm_bias = true;
  f.demand("bias", false, f.model.qkv_bias);
  f.require(f.model.is_parallel, "parallel_attn", "true", "false");
  f.require(f.model.activation == Activation::gelu, "activation", "gelu", "another one");
  f.config.erase("hidden_act");
  f.config["num_kv_heads"] = f.config["num_key_value_heads"];
  f.config["new_decoder_architecture"] = has_two_norms || f.size("num_key_value_heads") > 1;
  f.config["num_ln_in_parallel_attn"] = has_two_norms ? 2 : 1;
}

void stablelm_rows(GgufFields& f) {
  no_head_norms(f);
  f.norm_bias = true;
  f.require(f.model.activation == Activation::silu, "hidden_act", "silu", "another one");
  attention_bias(f, false, "use_qkv_bias");
  rotary_factor(f);
  f.flag("use_parallel_residual", "use_parallel_residual", f.model.is_parallel);
}

void olmo_rows(GgufFields& f) {
  constexpr const char* key = "attention.clamp_kqv";
  f.require(f.model.activation == Activation::silu, "hidden_act", "silu", "another one");
  f.config["attention_bias"] = false;
  no_attention_bias(f);
  const double limit = f.find_factor(key, 0);
  f.config["clip_qkv"] = limit > 0 ? json(limit) : json(nullptr);
  if (f.model.qkv_limit > 0) f.add(key, f.model.qkv_limit);
}

void exaone_rows(GgufFields& f) {
  no_attention_bias(f);
  f.demand("mlp_bias", false, f.model.mlp_bias);
}

/// Programs need the key of the limit.
void dbrx_rows(GgufFields& f) {
  constexpr const char* key = "attention.clamp_kqv";
  const double limit = f.find_factor(key, 0);
  f.config["clip_qkv"] = limit > 0 ? json(limit) : json(nullptr);
  f.add(key, f.model.qkv_limit);
  f.require(f.model.experts->normalises, "moe_normalize_expert_weights", "1", "null");
  experts(f, "num_experts", softmax, dense_width);
  f.require_key("expert_weights_norm", true);
}

/// No key has the noise of the router, by which SparseMixer chooses experts.
void phimoe_rows(GgufFields& f) {
  constexpr double noise = 0.01;
  f.norm_bias = f.head_bias = f.qkv_bias = f.output_bias = true;
  f.implied("attention_bias", true, f.model.qkv_bias);
  f.implied("lm_head_bias", true, f.model.head_bias);
  f.demand("router_jitter_noise", noise, f.model.experts->mixer_margin / 2);
  f.demand("tie_word_embeddings", false, f.model.tie_word_embeddings);
  f.config["sliding_window"] = nullptr;
  experts(f, "num_local_experts", softmax, dense_width);
}

void seed_oss_rows(GgufFields& f) {
  attention_bias(f, false);
  f.implied("attention_out_bias", false, f.model.o_bias);
  f.implied("mlp_bias", false, f.model.mlp_bias);
}

void ernie_rows(GgufFields& f) { f.implied("use_bias", false, f.model.qkv_bias); }

/// Experts in every step-th layer after the first dense ones.
void ernie_moe_rows(GgufFields& f) {
  constexpr const char* step_key = "interleave_moe_layer_step";
  const ExpertsConfig& of_model = *f.model.experts;
  const std::int64_t first = leading_dense_layers(f.model);
  f.config["use_bias"] = false;
  experts(f, "moe_num_experts", softmax, own_width);
  f.config["moe_k"] = f.config["num_experts_per_tok"];
  f.config.erase("num_experts_per_tok");
  f.require_key("expert_weights_norm", true);
  f.integer("expert_shared_count", "moe_num_shared_experts",
            of_model.shared_intermediate_size / of_model.intermediate_size,
            f.size("moe_num_experts"));
  f.find_integer(shared_width_key, 0);  // the product of both
  f.add(shared_width_key, of_model.shared_intermediate_size);
  f.integer_or("leading_dense_block_count", "moe_layer_start_index", 0, first);
  for (std::int64_t l = first; !f.reads() && l < f.layers; ++l) {
    f.require(f.model.layer(l).has_experts, "moe_layer_interval", "1", "another number");
  }
  f.integer_or(step_key, "moe_layer_interval", 1, 1);
}

void hunyuan_moe_rows(GgufFields& f) {
  const ExpertsConfig& of_model = *f.model.experts;
  no_attention_bias(f);
  experts(f, "num_experts", softmax, only_width);
  f.config["moe_topk"] = f.config["num_experts_per_tok"];
  f.config.erase("num_experts_per_tok");
  f.require_key("expert_weights_norm", true);
  f.require_key(shared_width_key, f.config["intermediate_size"]);
  f.add(shared_width_key, of_model.shared_intermediate_size);
}

void first_gemma_rows(GgufFields& f) {
  f.config["hidden_act"] = "gelu_pytorch_tanh";
  no_attention_bias(f);
  tied_head(f);
}

void olmoe_rows(GgufFields& f) {
  no_attention_bias(f);
  f.require(f.model.qkv_limit == 0, "clip_qkv", "null", "a number");
  normalised(f, false);
  f.config["norm_topk_prob"] = false;
  experts(f, "num_experts", softmax, dense_width);
}

/// llama.cpp gives models of 64 layers or more alone norms of heads.
void command_r_rows(GgufFields& f) {
  constexpr std::int64_t least_layers = 64;
  const bool has_norms = f.layers >= least_layers;
  f.require((f.model.qk_norm != QkNorm::none) == has_norms, "use_qk_norm",
            fmt::format("{} for {} layers", has_norms, f.layers), fmt::format("{}", !has_norms));
  f.config["use_qk_norm"] = f.has_in_layers("attn_q_norm.weight");
  no_attention_bias(f);
  tied_head(f);
  f.positive("logit_scale", "logit_scale", 1 / f.model.logits_divisor);
}

// Classes that a file's keys tell apart.

bool has_experts(GgufFields& f) { return f.find_integer("expert_count", 0).value_or(0) > 0; }

bool has_shared_expert(GgufFields& f) {
  return f.find_integer(shared_width_key, 0).value_or(0) > 0;
}

bool has_windows(GgufFields& f) { return window_of(f, 0) > 0; }

bool has_plain_rope(GgufFields& f) {
  return f.find_factor(query_scale_key, 0) == 0 && !f.config.contains("rope_scaling");
}

}  // namespace

const std::vector<GgufFamily>& gguf_families() {
  using F = GgufFields&;
  static const std::vector<GgufFamily> all = {
      {"llama", mixtral_rows, "MixtralForCausalLM", has_experts},
      {"llama", all_biases},
      {"qwen2", [](F f) { f.qkv_bias = true; }},
      {"qwen3", [](F f) { attention_bias(f, true); }},
      {"qwen2moe", qwen2moe_rows},
      {"qwen3moe", qwen3moe_rows},
      {"mistral3", [](F f) { f.config["sliding_window"] = nullptr; }, "MistralForCausalLM",
       has_plain_rope},
      {"mistral3", scaled_queries},
      {"minimax-m2", minimax_m2_rows},
      {"smollm3", smollm3_rows},
      {"olmo2", olmo3_rows, "Olmo3ForCausalLM", has_windows},
      {"olmo2", olmo2_rows},
      {"phi3", phi3_rows},
      {"granite", granite_rows},
      {"granitemoe", granitemoeshared_rows, "GraniteMoeSharedForCausalLM", has_shared_expert},
      {"granitemoe", granitemoe_rows},
      {"chatglm", glm4_rows},
      {"glm4", glm4_rows},
      {"glm4moe", glm4moe_rows},
      {"gemma2", gemma2_rows},
      {"gemma3", gemma3_rows},
      {"gpt-oss", gpt_oss_rows},
      {"cohere2", cohere2_rows},
      {"llama4", llama4_rows},
      {"mellum", mellum_rows},
      {"mimo2", mimo2_rows},
      {"step35", step35_rows},
      {"seed_oss", seed_oss_rows},
      {"ernie4_5", ernie_rows},
      {"ernie4_5-moe", ernie_moe_rows},
      {"exaone4", exaone4_rows},
      {"hunyuan-moe", hunyuan_moe_rows},
      {"gemma", first_gemma_rows},
      {"olmoe", olmoe_rows},
      {"hunyuan-dense", no_attention_bias},
      {"dots1", dots1_rows},
      {"command-r", command_r_rows},
      {"qwen3next", qwen3next_rows},
      {"qwen35", qwen35_rows},
      {"qwen35moe", [](F f) { qwen35_rows(f), hybrid_experts(f); }},
      {"arcee", arcee_rows},
      {"nemotron", nemotron_rows},
      {"exaone", exaone_rows},
      {"dbrx", dbrx_rows},
      {"phimoe", phimoe_rows},
      {"jais2", [](F f) { f.norm_bias = true, rows_without_gate(f); }},
      {"gpt2", gpt2_rows},
      {"starcoder", starcoder_rows},
      {"starcoder2", starcoder2_rows},
      {"phi2", phi2_rows},
      {"gptneox", gptneox_rows},
      {"falcon", falcon_rows},
      {"stablelm", stablelm_rows},
      {"olmo", olmo_rows},
      {"exaone-moe", exaone_moe_rows},
      {"afmoe", afmoe_rows},
      {"hy_v3", hy_v3_rows},
      {"bitnet", bitnet_rows},
      {"apertus", apertus_rows},
      {"gemma3n", gemma3n_rows},
      {"gemma4", gemma4_rows},
      {"lfm2", lfm2_rows},
      {"lfm2moe", lfm2moe_rows},
      {"granitehybrid", granitehybrid_rows},
      {"falcon-h1", falcon_h1_rows},
      {"nemotron_h", nemotron_h_rows},
      {"nemotron_h_moe", nemotron_h_rows},
      {"jamba", jamba_rows},
      {"deepseek2", youtu_rows, "YoutuForCausalLM", is_youtu},
      {"deepseek2", mistral4_rows, "Mistral4ForCausalLM", is_mistral4},
      {"deepseek2", deepseek_v2_rows, "DeepseekV2ForCausalLM", is_deepseek_v2},
      {"deepseek2", deepseek_v3_rows},
      {"mistral4", mistral4_rows},
      {"minicpm3", minicpm3_rows},
  };
  return all;
}

}  // namespace kvzap::model
