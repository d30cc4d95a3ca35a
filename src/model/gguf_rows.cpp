#include "model/gguf_rows.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "gguf/tensor_names.hpp"

namespace kvzap::model {

using nlohmann::json;

void attention_bias(GgufFields& f, bool with_output, const char* field) {
  f.qkv_bias = f.has_in_layers("attn_q.bias");
  f.output_bias = with_output && f.qkv_bias;
  f.config[field] = f.qkv_bias;
}

void all_biases(GgufFields& f) {
  attention_bias(f, true);
  f.config["mlp_bias"] = f.mlp_bias = f.has_in_layers("ffn_gate.bias");
}

void no_attention_bias(GgufFields& f) {
  f.demand("attention_bias", false, f.model.qkv_bias || f.model.o_bias);
}

void tied_head(GgufFields& f) {
  f.require(f.model.tie_word_embeddings, "tie_word_embeddings", "true", "a head of its own");
}

void rotary_factor(GgufFields& f) {
  const auto head_dim = static_cast<double>(f.head_dim);
  double factor = static_cast<double>(f.rotary_dim) / head_dim;
  if (static_cast<std::int64_t>(head_dim * factor) < f.rotary_dim) {
    factor = std::nextafter(factor, 2.0);
  }
  f.config["partial_rotary_factor"] = factor;
}

json& rope_parameters(GgufFields& f) {
  json rope = f.config.value("rope_scaling", json{{"rope_type", "default"}});
  f.config.erase("rope_scaling");
  rope["rope_theta"] = f.config["rope_theta"];
  return f.config["rope_parameters"] = std::move(rope);
}

void scaled_queries(GgufFields& f) {
  constexpr const char* length_key = "rope.scaling.original_context_length";
  json& rope = rope_parameters(f);
  const auto& scaling = f.model.query_scaling;
  const double beta = f.find_factor(query_scale_key, 0);
  if (beta != 0) {
    const std::int64_t original = f.find_integer(length_key, 2).value_or(f.context);
    rope["llama_4_scaling_beta"] = beta;
    rope["original_max_position_embeddings"] = original;
    f.require_key("attention.temperature_length", original);
  }
  if (f.reads() || !scaling) return;
  f.add(query_scale_key, scaling->beta);
  const auto& of_rope = f.model.rope_scaling;
  if (f.architecture.has_latents) f.add("attention.temperature_length", scaling->length);
  if (!of_rope) return f.add(length_key, scaling->length);
  if (of_rope->original_max_position_embeddings != scaling->length) refuse_scaling(f);
}

void rope_layers(GgufFields& f, std::int64_t interval) {
  json flags = json::array();
  for (std::int64_t l = 0; l < f.layers; ++l) {
    const int has_rope = ends_period(l, interval) ? 0 : 1;
    f.require(f.model.layer(l).has_rope == (has_rope == 1), fmt::format("no_rope_layers[{}]", l),
              fmt::format("{}", has_rope), fmt::format("{}", 1 - has_rope));
    flags.push_back(has_rope);
  }
  f.config["no_rope_layers"] = std::move(flags);
}

void one_rope(GgufFields& f) {
  const auto found = f.find_number(window_theta_key);
  if (!found || *found == f.config["rope_theta"]) return;
  const auto expected = f.config["rope_theta"].get<double>();
  f.fail_key(window_theta_key, fmt::format("{} as rope.freq_base", expected),
             fmt::format("{}", *found));
}

void pattern_of_layers(GgufFields& f, const char* reduced) {
  constexpr const char* key = "attention.sliding_window_pattern";
  const auto flags = f.find_flags(key);
  std::int64_t pattern = 0;
  if (f.reads() && !flags) {
    pattern = f.find_integer(key, 0).value_or(f.architecture.window_pattern);
  }
  const auto is_full_in_model = [&](std::int64_t l) {
    return f.model.layer(l).window == 0 && f.model.layer(l).chunk == 0;
  };
  for (std::int64_t l = 0; !f.reads() && pattern == 0 && l < f.layers; ++l) {
    if (is_full_in_model(l)) pattern = l + 1;
  }
  json types = json::array();
  const auto name = [&](bool is_full) { return is_full ? "full_attention" : reduced; };
  for (std::int64_t l = 0; l < f.layers; ++l) {
    const bool is_full = flags ? !(*flags)[static_cast<std::size_t>(l)] : ends_period(l, pattern);
    types.push_back(name(is_full));
    if (f.reads() || is_full == is_full_in_model(l)) continue;
    f.fail(fmt::format("layer_types[{}]", l),
           fmt::format("{}, as GGUF needs one full layer in {}", name(is_full), pattern),
           name(!is_full));
  }
  f.config["layer_types"] = std::move(types);
  f.add(key, pattern);
}

std::int64_t window_of(GgufFields& f, std::int64_t absent) {
  if (f.reads()) return f.find_integer(window_key, 0).value_or(absent);
  std::int64_t window = 0;
  for (const LayerConfig& layer : f.model.layers) window = std::max(window, layer.window);
  return window;
}

void windows(GgufFields& f, std::int64_t absent) {
  const std::int64_t window = window_of(f, absent);
  f.require(window > 0, "sliding_window", "a window in some layers", "none");
  if (window == 0) f.fail_key(window_key, "a number of tokens above 0", "none");
  f.config["sliding_window"] = window;
  f.add(window_key, window);
  pattern_of_layers(f, "sliding_attention");
}

void granite_factors(GgufFields& f) {
  f.factor("embedding_scale", "embedding_multiplier", 1, f.model.embedding_multiplier);
  f.factor("residual_scale", "residual_multiplier", 1, f.model.residual_multiplier);
  f.positive("logit_scale", "logits_scaling", f.model.logits_divisor);
  const double absent = 1 / std::sqrt(static_cast<double>(f.head_dim));
  f.config["attention_multiplier"] = f.find_factor("attention.scale", absent);
  if (f.model.attention_multiplier) f.add("attention.scale", *f.model.attention_multiplier);
}

void experts(GgufFields& f, const char* count_field, std::int64_t gating,
             void (*width)(GgufFields& f)) {
  constexpr const char* gating_key = "expert_gating_func";
  constexpr std::int64_t max_expert_count = 65536;
  f.has_experts = true;
  f.integer("expert_count", count_field, f.model.experts->count, max_expert_count);
  f.integer("expert_used_count", "num_experts_per_tok", f.model.experts->per_token,
            f.size(count_field));
  width(f);
  f.require_key(gating_key, gating);
  if (gating != softmax_of_chosen) f.add(gating_key, gating);
}

void own_width(GgufFields& f) {
  constexpr const char* dense_field = "intermediate_size";
  auto width = f.find_integer(width_key, 1);
  if (!width && f.config.contains(dense_field)) {
    width = std::max<std::int64_t>(1, f.size(dense_field) / f.size("num_experts_per_tok"));
  }
  f.config["moe_intermediate_size"] = width ? *width : f.whole(width_key, 1);
  f.add(width_key, f.model.experts->intermediate_size);
}

void dense_width(GgufFields& f) { f.add(width_key, f.model.experts->intermediate_size); }

void only_width(GgufFields& f) {
  f.integer(width_key, "intermediate_size", f.model.experts->intermediate_size);
}

void shared_width(GgufFields& f) {
  const auto width = f.find_integer(shared_width_key, 1);
  const bool has_dense = f.config.contains("intermediate_size");
  f.config["shared_expert_intermediate_size"] =
      width ? *width : f.size(has_dense ? "intermediate_size" : "moe_intermediate_size");
  f.add(shared_width_key, f.model.experts->shared_intermediate_size);
}

void normalised(GgufFields& f, bool value) {
  f.demand("norm_topk_prob", value, f.model.experts->normalises);
  f.require_key("expert_weights_norm", value);
}

void qwen_experts(GgufFields& f, bool normalises) {
  normalised(f, normalises);
  f.config["norm_topk_prob"] = normalises;
  experts(f, "num_experts", softmax, own_width);
  json dense = json::array();
  for (std::int64_t l = 0; l < f.layers; ++l) {
    if (!f.tensor(gguf::name_in_layer(l, "ffn_gate_inp.weight"))) dense.push_back(l);
  }
  f.config["mlp_only_layers"] = std::move(dense);
}

void grouped_experts(GgufFields& f, std::int64_t gating, const GroupedFields& fields) {
  const ExpertsConfig& of_model = *f.model.experts;
  experts(f, fields.count, gating, own_width);
  f.integer("expert_shared_count", fields.shared,
            of_model.shared_intermediate_size / of_model.intermediate_size, f.size(fields.count));
  const std::int64_t first = leading_dense_layers(f.model);
  f.integer_or("leading_dense_block_count", fields.leading, 0, first);
  for (std::int64_t l = first; !f.reads() && l < f.layers; ++l) {
    f.require(f.model.layer(l).has_experts, "layers without experts", "the first ones",
              fmt::format("layer {}", l));
  }
  f.factor("expert_weights_scale", fields.scale, 1, of_model.scale);
  f.flag("expert_weights_norm", fields.normalises, of_model.normalises);
}

void expert_groups(GgufFields& f) {
  const ExpertsConfig& of_model = *f.model.experts;
  const auto groups = [&](const char* key, const char* field, std::int64_t value) {
    const auto found = f.find_integer(key, 0, f.size("n_routed_experts")).value_or(0);
    f.config[field] = std::max<std::int64_t>(found, 1);
    if (of_model.groups != 1) f.add(key, value);
  };
  groups("expert_group_count", "n_group", of_model.groups);
  groups("expert_group_used_count", "topk_group", of_model.groups_per_token);
}

std::int64_t leading_dense_layers(const ModelConfig& model) {
  std::int64_t dense = 0;
  while (dense < model.num_hidden_layers && !model.layer(dense).has_experts) ++dense;
  return dense;
}

}  // namespace kvzap::model
