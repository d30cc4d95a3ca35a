// Llama 4, Scout and Maverick: layers with RoPE attend within chunks, layers without it to all
// tokens.
#include <fmt/format.h>

#include <algorithm>

#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

constexpr double largest_scale_of_queries = 1e9;

void read_moe_layers(ConfigFields& fields, ModelConfig& config) {
  const std::int64_t step = fields.find_size("interleave_moe_layer_step", max_size).value_or(1);
  const nlohmann::json* const listed = fields.get("moe_layers");
  if (listed != nullptr && !listed->is_array()) {
    fields.fail("moe_layers", "an array", files::described(*listed));
  }
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
    config.layers[static_cast<std::size_t>(l)].has_experts =
        listed == nullptr && (l + 1) % step == 0;
  }
  if (listed == nullptr) return;
  for (const nlohmann::json& layer : *listed) {
    if (!layer.is_number_unsigned()) continue;
    const auto number = layer.get<std::uint64_t>();
    if (number < config.layers.size()) config.layers[number].has_experts = true;
  }
}

void read_llama4_experts(ConfigFields& fields, ModelConfig& config) {
  ExpertsConfig experts = read_experts(fields, "num_local_experts", 1, config);
  experts.scores = ExpertsConfig::Scores::sigmoid;
  experts.scales_input = true;
  experts.shared_intermediate_size = experts.intermediate_size;
  config.experts = experts;
  config.intermediate_size = fields.find_size("intermediate_size_mlp", max_size).value_or(16384);
  read_moe_layers(fields, config);
}

/// Queries of layers without RoPE grow with their position.
void read_temperature(ConfigFields& fields, ModelConfig& config) {
  QueryScaling scaling;
  scaling.beta = fields.find_number("attn_scale", 0, largest_scale_of_queries).value_or(0.1);
  scaling.length = fields.find_size("floor_scale", max_size).value_or(8192);
  scaling.offset = 1;
  scaling.in_rope_layers = false;
  // Early files have a number.
  const nlohmann::json* const tunes = fields.get("attn_temperature_tuning");
  const bool is_off = tunes != nullptr && (tunes->is_number() ? *tunes == 0 : *tunes == false);
  if (tunes != nullptr && !tunes->is_number() && !tunes->is_boolean()) {
    fields.fail("attn_temperature_tuning", "true or false", files::described(*tunes));
  }
  if (!is_off) config.query_scaling = scaling;
}

/// Layers with RoPE have chunks, unless layer_types says which do.
void read_chunks(ConfigFields& fields, ModelConfig& config) {
  const auto stated = fields.find_size("attention_chunk_size", max_size);
  const std::int64_t chunk = fields.has_key("attention_chunk_size") ? stated.value_or(0) : 8192;
  const auto types = read_layer_types(fields, chunk > 0 ? "chunked_attention" : "", config);
  for (std::size_t l = 0; l < config.layers.size(); ++l) {
    LayerConfig& layer = config.layers[l];
    if (types ? (*types)[l] : layer.has_rope) layer.chunk = chunk;
  }
}

}  // namespace

const Family llama4 = [] {
  Family family;
  family.class_name = "Llama4ForCausalLM";
  family.model_type = "llama4_text";
  family.text_defaults =
      R"({"vocab_size":202048,"hidden_size":5120,"intermediate_size":8192,"num_hidden_layers":48,)"
      R"("num_attention_heads":40,"max_position_embeddings":131072,"num_local_experts":16})";
  family.tested = family_tests;
  family.default_key_value_heads = 8;
  family.default_head_dim = 128;
  family.default_norm_eps = 1e-5;
  family.rope.default_theta = 500000;
  family.rope.is_interleaved = true;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    ignore_bias(fields, "attention_bias", config);
    if (fields.flag("use_qk_norm", true)) config.qk_norm = QkNorm::unit;
    // The norms follow RoPE in transformers and precede it here, which is the same unless RoPE
    // also multiplies.
    if (config.qk_norm == QkNorm::unit && config.rope_attention_factor() != 1) {
      fields.fail("rope_scaling", "an attention factor of 1 with use_qk_norm",
                  fmt::format("{}", config.rope_attention_factor()));
    }
    fields.get("for_llm_compressor");  // of a program that quantises
    read_rope_layers(fields, true, config);
    read_llama4_experts(fields, config);
    read_temperature(fields, config);
    read_chunks(fields, config);
  };
  family.tensors.feed_forward = "feed_forward";
  family.tensors.router = "feed_forward.router";
  family.tensors.experts_gate_up = "feed_forward.experts.gate_up_proj";
  family.tensors.experts_down = "feed_forward.experts.down_proj";
  family.tensors.shared = "feed_forward.shared_expert";
  return family;
}();

}  // namespace kvzap::model
