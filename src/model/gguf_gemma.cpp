#include "model/gguf_gemma.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "files/decimal.hpp"
#include "gguf/tensor_names.hpp"
#include "model/gguf_rows.hpp"

namespace kvzap::model {

using nlohmann::json;

namespace {

constexpr const char* pattern_key = "attention.sliding_window_pattern";
constexpr const char* shared_key = "attention.shared_kv_layers";
constexpr const char* inputs_key = "embedding_length_per_layer_input";
constexpr const char* widths_key = "feed_forward_length";
constexpr const char* factors_name = "rope_freqs.weight";
constexpr std::int64_t most_dims = 65536;

/// Returns for each layer whether it has a window.
std::vector<bool> sliding_layers(GgufFields& f) {
  std::vector<bool> slides;
  for (const LayerConfig& layer : f.model.layers) slides.push_back(layer.window > 0);
  if (!f.reads()) return slides;
  if (const auto flags = f.find_flags(pattern_key)) return *flags;
  const auto pattern = f.find_integer(pattern_key, 0).value_or(f.architecture.window_pattern);
  for (std::int64_t l = 0; l < f.layers; ++l) slides.push_back(!ends_period(l, pattern));
  return slides;
}

std::int64_t shared_layers(const GgufFields& f) {
  if (f.reads()) {
    return f.metadata().find_integer(f.own(shared_key), 0, f.layers - 1).value_or(0);
  }
  return std::count_if(f.model.layers.begin(), f.model.layers.end(),
                       [](const LayerConfig& layer) { return layer.rows_of >= 0; });
}

/// Programs let the last layers read the rows of the two layers before them: those with a window
/// the rows of the first one.
void shared_rows(GgufFields& f, const std::vector<bool>& slides) {
  const std::int64_t shared = shared_layers(f);
  f.find_integer(shared_key, 0);
  f.config["num_kv_shared_layers"] = shared;
  f.add(shared_key, shared);
  const auto first = static_cast<std::size_t>(f.layers - shared);
  const bool fits = shared == 0 || (first > 1 && slides[first - 2] && !slides[first - 1]);
  f.require(fits, "layer_types",
            fmt::format("a window in layer {} and none in layer {}",
                        static_cast<std::int64_t>(first) - 2, first - 1),
            "others");
}

void window_rows(GgufFields& f, const std::vector<bool>& slides) {
  json types = json::array();
  for (const bool is_sliding : slides) {
    types.push_back(is_sliding ? "sliding_attention" : "full_attention");
  }
  f.config["layer_types"] = std::move(types);
  const std::int64_t window = window_of(f, 0);
  f.require(window > 0, "sliding_window", "a window in some layers", "none");
  if (window == 0) f.fail_key(window_key, "a number of tokens above 0", "none");
  f.config["sliding_window"] = window;
  f.add(window_key, window);
  f.add(pattern_key, slides);
}

/// The second embedding; 0: there is none.
void input_rows(GgufFields& f) {
  f.integer_or(inputs_key, "hidden_size_per_layer_input", 0,
               f.model.layer_inputs ? f.model.layer_inputs->size : 0);
  if (const gguf::TensorEntry* const table = f.tensor("per_layer_token_embd.weight")) {
    f.config["vocab_size_per_layer_input"] = table->shape.front();
  }
}

void rows_of_both(GgufFields& f) {
  f.config.erase("hidden_act");
  f.config["hidden_activation"] = "gelu_pytorch_tanh";
  f.config["attention_bias"] = false;
  no_attention_bias(f);
  const double cap = f.find_factor("final_logit_softcapping", 0);
  f.config["final_logit_softcapping"] = cap > 0 ? json(cap) : json(nullptr);
  if (f.model.logits_soft_cap > 0) f.add("final_logit_softcapping", f.model.logits_soft_cap);
  const std::vector<bool> slides = sliding_layers(f);
  window_rows(f, slides);
  shared_rows(f, slides);
  input_rows(f);
}

std::int64_t common_of(GgufFields& f, const char* key, const std::vector<std::int64_t>& numbers,
                       const std::vector<bool>& slides, bool sliding) {
  std::vector<std::int64_t> of_kind;
  for (std::size_t l = 0; l < slides.size(); ++l) {
    if (slides[l] == sliding) of_kind.push_back(numbers[l]);
  }
  const std::int64_t common = f.common_number(key, of_kind);
  const bool has_zero = std::find(of_kind.begin(), of_kind.end(), 0) != of_kind.end();
  if (has_zero) f.fail_key(key, "numbers above 0", "0");
  return common;
}

/// Widths, which layers that read the rows of others may have doubled.
void read_widths(GgufFields& f) {
  const auto widths = f.numbers_of_layers(widths_key);
  const std::int64_t own = widths.front();
  const bool doubles = widths.back() != own;
  const auto first = static_cast<std::size_t>(f.layers - shared_layers(f));
  for (std::size_t l = 0; l < widths.size(); ++l) {
    const std::int64_t expected = doubles && l >= first ? 2 * own : own;
    if (widths[l] == expected && own > 0) continue;
    f.fail_key(widths_key,
               fmt::format("widths above 0, which layers from {} on may have doubled", first),
               fmt::format("{} of layer {}", widths[l], l));
  }
  f.config["intermediate_size"] = own;
  f.config["use_double_wide_mlp"] = doubles;
}

void read_heads(GgufFields& f) {
  constexpr const char* kv_key = "attention.head_count_kv";
  const std::vector<bool> slides = sliding_layers(f);
  const auto dims = [&](const std::string& end) {
    const std::string key = "attention.key_length" + end;
    const std::int64_t dim = f.whole(key, 2, most_dims);
    if (dim % 2 != 0) f.fail_key(key, "an even number", fmt::format("{}", dim));
    for (const char* of : {"attention.value_length", "rope.dimension_count"}) {
      const std::string other = of + end;
      const std::int64_t found = f.find_integer(other, 1).value_or(dim);
      if (found != dim)
        f.fail_key(other, fmt::format("{} as {}", dim, key), fmt::format("{}", found));
    }
    return dim;
  };
  f.head_dim = f.rotary_dim = dims("");
  f.config["head_dim"] = dims("_swa");
  const auto heads = f.numbers_of_layers(kv_key);
  const std::int64_t full = common_of(f, kv_key, heads, slides, false);
  const std::int64_t sliding = common_of(f, kv_key, heads, slides, true);
  f.config["num_key_value_heads"] = sliding > 0 ? sliding : full;
  for (std::size_t l = 0; l < slides.size(); ++l) {
    if (slides[l]) continue;
    f.config["per_layer_config"][fmt::format("{}", l)] = {{"head_dim", f.head_dim},
                                                          {"num_key_value_heads", full}};
  }
}

void write_sizes_of_layers(GgufFields& f) {
  json widths = json::array(), heads = json::array();
  std::int64_t dim = f.model.head_dim;
  for (std::int64_t l = 0; l < f.layers; ++l) {
    const LayerConfig layer = f.model.layer(l);
    widths.push_back(layer.intermediate_size > 0 ? layer.intermediate_size
                                                 : f.model.intermediate_size);
    heads.push_back(f.model.kv_heads_of(l));
    if (layer.window > 0) dim = f.model.head_dim_of(l);
  }
  f.head_dim = f.rotary_dim = f.model.head_dim;
  f.add(widths_key, widths);
  f.add("attention.head_count_kv", heads);
  for (const char* key : {"attention.key_length", "attention.value_length"}) {
    f.add(key, f.model.head_dim);
    f.add(fmt::format("{}_swa", key), dim);
  }
  f.add("rope.dimension_count_swa", dim);
}

/// Returns the pairs that turn: those with a factor of 1, before all others.
std::int64_t turning_pairs(const GgufFields& f) {
  const gguf::TensorEntry* const tensor = f.tensor(factors_name);
  const std::vector<float> factors = rope_factors_of(f, factors_name);
  constexpr float least = 1e20F;  // of pairs that do not turn
  const auto end = std::find_if(factors.begin(), factors.end(), [](float x) { return x != 1; });
  const auto other = std::find_if(end, factors.end(), [](float x) { return x < least; });
  if (other == factors.end()) return end - factors.begin();
  throw Error(fmt::format("{}: tensor '{}': expected ones, then values from {} on, found {}",
                          *tensor->file, factors_name, least, *other));
}

/// Returns the probability of a standard normal number below `quantile`.
double normal_probability(double quantile) { return std::erfc(-quantile / std::sqrt(2.0)) / 2; }

/// The part of each layer's gates that is cut off, as a number of deviations from the mean.
void sparsity_rows(GgufFields& f) {
  constexpr const char* key = "activation_sparsity_scale";
  constexpr double none = -INFINITY;
  json of_model = json::array();
  for (const LayerConfig& layer : f.model.layers) {
    of_model.push_back(layer.gate_cutoff.value_or(none));
  }
  f.add(key, of_model);
  json parts = json::array();
  const auto cutoffs = f.metadata().find_floats(f.read(key), static_cast<std::uint64_t>(f.blocks));
  for (const float cutoff : cutoffs.value_or(std::vector<float>())) {
    const auto part = static_cast<float>(normal_probability(cutoff));
    if (part >= 1) f.fail_key(key, "numbers below 5", fmt::format("{}", cutoff));
    parts.push_back(files::decimal_of(part));
  }
  if (cutoffs) f.config["activation_sparsity_pattern"] = std::move(parts);
}

}  // namespace

void gemma4_sizes(GgufFields& f) {
  f.uniform("attention.head_count", "num_attention_heads", f.model.num_attention_heads);
  if (!f.reads()) return write_sizes_of_layers(f);
  read_widths(f);
  read_heads(f);
}

void gemma4_rope(GgufFields& f) {
  constexpr double absent_theta = 10000;
  f.positive("rope.freq_base", "rope_theta", f.model.rope_theta, absent_theta);
  f.positive(window_theta_key, "rope_local_base_freq",
             f.model.window_rope_theta.value_or(f.model.rope_theta), absent_theta);
  f.add("rope.dimension_count", f.rotary_dim);
  f.require(!f.model.rope_scaling, "RoPE scaling", "none", "another kind");
  if (!f.reads()) return;
  const auto pairs = static_cast<double>(f.rotary_dim / 2);
  const auto turning = static_cast<double>(turning_pairs(f));
  double part = turning / pairs;
  if (std::floor(part * 2 * pairs) < 2 * turning) part = std::nextafter(part, 2.0);
  f.config["rope_parameters"] = {
      {"full_attention",
       {{"rope_type", "proportional"},
        {"rope_theta", f.config["rope_theta"]},
        {"partial_rotary_factor", part}}},
      {"sliding_attention",
       {{"rope_type", "default"}, {"rope_theta", f.config["rope_local_base_freq"]}}}};
  f.config.erase("rope_theta");
  f.config.erase("rope_local_base_freq");
}

void gemma3n_widths(GgufFields& f) {
  json of_model = json::array();
  for (std::int64_t l = 0; !f.reads() && l < f.layers; ++l) {
    const std::int64_t own = f.model.layer(l).intermediate_size;
    of_model.push_back(own > 0 ? own : f.model.intermediate_size);
  }
  f.add(widths_key, of_model);
  if (!f.reads()) return;
  json& widths = f.config["intermediate_size"] = json::array();
  for (const std::int64_t width : f.numbers_of_layers(widths_key)) {
    widths.push_back(static_cast<std::uint64_t>(width));
  }
}

void gemma3n_rows(GgufFields& f) {
  constexpr double absent_theta = 10000;
  rows_of_both(f);
  require_scaling_by_keys(f, false);
  f.positive(window_theta_key, "rope_local_base_freq",
             f.model.window_rope_theta.value_or(f.model.rope_theta), absent_theta);
  const AltUpConfig& streams = *f.model.alt_up;
  f.integer("altup.num_inputs", "altup_num_inputs", streams.streams, AltUpConfig::most_streams);
  f.integer_or("altup.active_idx", "altup_active_idx", 0, streams.active);
  f.implied("altup_correct_scale", true, streams.scales_output);
  const auto* const map = f.tensor(gguf::name_in_layer(0, "laurel_l.weight"));
  if (map != nullptr) f.config["laurel_rank"] = map->shape.front();
  sparsity_rows(f);
}

void gemma4_rows(GgufFields& f) {
  rows_of_both(f);
  const std::vector<bool> slides = sliding_layers(f);
  bool keys_are_values = false;
  for (std::int64_t l = 0; f.reads() && l < f.layers; ++l) {
    const bool has_keys = f.tensor(gguf::name_in_layer(l, "attn_k.weight")) != nullptr;
    const bool has_values = f.tensor(gguf::name_in_layer(l, "attn_v.weight")) != nullptr;
    if (!slides[static_cast<std::size_t>(l)] && has_keys && !has_values) keys_are_values = true;
  }
  f.config["attention_k_eq_v"] = keys_are_values;
  if (!f.architecture.has_experts.value()) return;
  experts(f, "num_experts", softmax, own_width);
  f.require_key("expert_weights_norm", true);
  f.config["top_k_experts"] = f.config["num_experts_per_tok"];
  f.config.erase("num_experts_per_tok");
  f.config["enable_moe_block"] = true;
}

}  // namespace kvzap::model
