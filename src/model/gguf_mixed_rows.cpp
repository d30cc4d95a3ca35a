// Rows of families with a flag for each layer with a window, whose heads or RoPE may differ.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "gguf/tensor_names.hpp"
#include "model/gguf_rows.hpp"

namespace kvzap::model {

using nlohmann::json;

namespace {

constexpr const char* heads_key = "attention.head_count";
constexpr const char* kv_heads_key = "attention.head_count_kv";
constexpr const char* window_flags_key = "attention.sliding_window_pattern";

/// The flags of all layers. `may_lack`: files without a window have none.
std::vector<bool> window_flags(GgufFields& f, bool may_lack = false) {
  const auto flags = f.find_flags(window_flags_key);
  if (flags) return {flags->begin(), flags->begin() + f.layers};
  if (may_lack) return std::vector<bool>(static_cast<std::size_t>(f.layers));
  f.fail_key(window_flags_key, "a flag for each layer", "none");
}

/// Returns the number of all layers of a kind; 0: there are none.
std::int64_t number_of_kind(GgufFields& f, const char* key,
                            const std::vector<std::int64_t>& numbers,
                            const std::vector<bool>& flags, bool have_window) {
  std::int64_t common = 0;
  for (std::size_t l = 0; l < flags.size(); ++l) {
    if (flags[l] != have_window || (common > 0 && numbers[l] == common)) continue;
    if (common > 0 || numbers[l] == 0) {
      f.fail_key(key,
                 fmt::format("the same number above 0 in all layers {} a window",
                             have_window ? "with" : "without"),
                 fmt::format("{} in layer {}", numbers[l], l));
    }
    common = numbers[l];
  }
  return common;
}

/// Layers with a window by their flags.
void flagged_windows(GgufFields& f) {
  json of_model = json::array(), types = json::array();
  for (const LayerConfig& layer : f.model.layers) of_model.push_back(layer.window > 0);
  const std::int64_t window = window_of(f, 0);
  if (window > 0 || f.architecture.has_heads_of_kinds) {
    f.add(window_key, window);
    f.add(window_flags_key, of_model);
  }
  if (!f.reads()) return;
  for (const bool has_window : window_flags(f, window == 0)) {
    if (has_window && window == 0) f.fail_key(window_key, "a number of tokens above 0", "none");
    types.push_back(has_window ? "sliding_attention" : "full_attention");
  }
  f.config["sliding_window"] = window > 0 ? json(window) : json(nullptr);
  f.config["layer_types"] = std::move(types);
}

/// RoPE of both kinds of layers, which turn these parts of a head. Full layers alone have scaling.
/// `absent_theta`: the base of layers with a window without the key.
void rope_of_kinds(GgufFields& f, std::int64_t full_dim, std::int64_t window_dim,
                   double absent_theta = 10000) {
  f.positive(window_theta_key, "rope_local_base_freq",
             f.model.window_rope_theta.value_or(f.model.rope_theta), absent_theta);
  if (!f.reads()) return;
  const auto part = [&](std::int64_t dim) {
    f.rotary_dim = dim;
    rotary_factor(f);
    return f.config["partial_rotary_factor"];
  };
  const json of_window = {{"rope_type", "default"},
                          {"rope_theta", f.config["rope_local_base_freq"]},
                          {"partial_rotary_factor", part(window_dim)}};
  const json factor = part(full_dim);
  json full = rope_parameters(f);
  full["partial_rotary_factor"] = factor;
  const auto has = [&](const char* kind) {
    const json& types = f.config["layer_types"];
    return std::find(types.begin(), types.end(), kind) != types.end();
  };
  json both = {{"full_attention", std::move(full)}};
  if (has("sliding_attention")) both["sliding_attention"] = of_window;
  f.config["rope_parameters"] = std::move(both);
  for (const char* field : {"rope_theta", "rope_local_base_freq", "partial_rotary_factor"}) {
    f.config.erase(field);
  }
}

/// Layers with a router have experts.
void sparse_types(GgufFields& f) {
  json types = json::array();
  for (std::int64_t l = 0; f.reads() && l < f.layers; ++l) {
    const bool has = f.tensor(gguf::name_in_layer(l, "ffn_gate_inp.weight")) != nullptr;
    types.push_back(has ? "sparse" : "dense");
  }
  f.config["mlp_layer_types"] = std::move(types);
}

/// Limits of layers; 0: none.
void limits(GgufFields& f, const char* key, const char* field, double LayerConfig::*limit) {
  json of_model = json::array();
  bool has_any = false;
  for (const LayerConfig& layer : f.model.layers) {
    of_model.push_back(layer.*limit);
    has_any = has_any || layer.*limit > 0;
  }
  if (has_any) f.add(key, of_model);
  auto found = f.metadata().find_floats(f.read(key), static_cast<std::uint64_t>(f.blocks));
  if (!found) return;
  found->resize(static_cast<std::size_t>(f.layers));
  f.config[field] = *found;
}

}  // namespace

void heads_of_kinds(GgufFields& f) {
  const bool doubles_kv_heads = f.architecture.name == "mimo2";
  json query_heads = json::array(), kv_heads = json::array();
  for (const LayerConfig& layer : f.model.layers) {
    query_heads.push_back(layer.query_heads > 0 ? layer.query_heads : f.model.num_attention_heads);
    kv_heads.push_back(f.model.num_key_value_heads * layer.kv_heads_factor);
  }
  f.add(heads_key, query_heads);
  f.add(kv_heads_key, kv_heads);
  if (!f.reads()) return;
  const std::vector<bool> flags = window_flags(f);
  const auto of_kind = [&](const char* key, bool have_window) {
    return number_of_kind(f, key, f.numbers_of_layers(key), flags, have_window);
  };
  const std::int64_t factor = doubles_kv_heads ? 2 : 1;
  const std::int64_t window_heads = of_kind(heads_key, true);
  const std::int64_t window_kv_heads = of_kind(kv_heads_key, true);
  std::int64_t heads = of_kind(heads_key, false), of_full = of_kind(kv_heads_key, false);
  if (heads == 0)
    heads = window_heads, of_full = std::max<std::int64_t>(1, window_kv_heads / factor);
  f.config["num_attention_heads"] = heads;
  f.config["num_key_value_heads"] = of_full;
  if (window_heads == 0) return;
  const auto require = [&](const char* key, std::int64_t expected, std::int64_t found) {
    if (found == expected) return;
    f.fail_key(key, fmt::format("{} in layers with a window", expected), fmt::format("{}", found));
  };
  require(kv_heads_key, factor * of_full, window_kv_heads);
  if (doubles_kv_heads) return require(heads_key, heads, window_heads);
  f.config["num_sliding_attention_heads"] = window_heads;
}

/// llama.cpp gives both kinds of layers one base, and layers with a window no scaling.
void mellum_rows(GgufFields& f) {
  attention_bias(f, true);
  require_scaling_by_keys(f, true);
  flagged_windows(f);
  const double theta = f.model.window_rope_theta.value_or(f.model.rope_theta);
  f.require(theta == f.model.rope_theta, "rope_parameters.sliding_attention.rope_theta",
            "that of full_attention", "another number");
  const double absent = f.reads() ? f.config["rope_theta"].get<double>() : theta;
  rope_of_kinds(f, f.head_dim, f.head_dim, absent);
  f.demand("tie_word_embeddings", false, f.model.tie_word_embeddings);
  for (std::int64_t l = 0; !f.reads() && l < f.layers; ++l) {
    f.require(f.model.layer(l).has_experts, "mlp_layer_types", "sparse", "dense");
  }
  sparse_types(f);
  normalised(f, true);
  f.config["norm_topk_prob"] = true;
  experts(f, "num_experts", softmax, own_width);
}

/// Layers with a window have twice the KV heads.
void mimo2_rows(GgufFields& f) {
  constexpr const char* scale_key = "attention.value_scale";
  const ExpertsConfig& of_model = *f.model.experts;
  no_attention_bias(f);
  flagged_windows(f);
  f.require(!f.model.rope_scaling, "RoPE scaling", "none", "another kind");
  f.require(f.model.window_rotary_dim == 0 || f.model.window_rotary_dim == f.rotary_dim,
            "rope_parameters.sliding_attention.partial_rotary_factor", "that of full_attention",
            "another number");
  rope_of_kinds(f, f.rotary_dim, f.rotary_dim);
  f.demand("tie_word_embeddings", false, f.model.tie_word_embeddings);
  f.config["attention_value_scale"] = f.find_factor(scale_key, 1);
  f.add(scale_key, f.model.attention_out_multiplier);
  sparse_types(f);
  experts(f, "n_routed_experts", sigmoid, own_width);
  f.require_key("expert_weights_norm", true);
  f.implied("norm_topk_prob", true, of_model.normalises);
  f.implied("routed_scaling_factor", 1.0, of_model.scale);
  f.implied("n_group", 1, of_model.groups);
  f.config["topk_group"] = 1;
}

/// Full layers turn half as many values of a head as layers with a window.
void step35_rows(GgufFields& f) {
  const ExpertsConfig& of_model = *f.model.experts;
  no_attention_bias(f);
  flagged_windows(f);
  f.require(f.model.window_rotary_dim == 0 || f.model.window_rotary_dim == 2 * f.rotary_dim,
            "rope_parameters.sliding_attention.partial_rotary_factor",
            "twice that of full_attention", "another number");
  rope_of_kinds(f, f.rotary_dim, 2 * f.rotary_dim);
  f.require(!f.model.attention_multiplier, "query_pre_attn_scalar", "head_dim", "another number");
  f.demand("tie_word_embeddings", false, f.model.tie_word_embeddings);
  sparse_types(f);
  f.find_integer("leading_dense_block_count", 0);
  f.add("leading_dense_block_count", leading_dense_layers(f.model));
  experts(f, "n_routed_experts", sigmoid, own_width);
  f.integer(shared_width_key, "share_expert_dim", of_model.shared_intermediate_size);
  f.require_key("expert_weights_norm", true);
  f.add("expert_weights_norm", true);
  f.factor("expert_weights_scale", "moe_router_scaling_factor", 1, of_model.scale);
  limits(f, "swiglu_clamp_exp", "swiglu_limits", &LayerConfig::experts_limit);
  limits(f, "swiglu_clamp_shexp", "swiglu_limits_shared", &LayerConfig::dense_limit);
}

}  // namespace kvzap::model
