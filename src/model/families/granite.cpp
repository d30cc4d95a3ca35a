// IBM Granite 3 and 4: Llama with factors of embedding, attention, residuals and logits; with
// experts, or with windows and sinks.
#include <fmt/format.h>

#include <algorithm>

#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

void read_granite(ConfigFields& fields, ModelConfig& config) {
  config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
  config.embedding_multiplier = read_multiplier(fields, "embedding_multiplier");
  config.residual_multiplier = read_multiplier(fields, "residual_multiplier");
  config.attention_multiplier = read_multiplier(fields, "attention_multiplier");
  config.logits_divisor = read_multiplier(fields, "logits_scaling");
}

Family granite_family() {
  Family family;
  family.tested = family_tests;
  return family;
}

Family granite_moe_family() {
  Family family = granite_family();
  family.tensors.router = "block_sparse_moe.router.layer";
  family.tensors.experts_gate_up = "block_sparse_moe.input_linear.weight";
  family.tensors.experts_down = "block_sparse_moe.output_linear.weight";
  family.tensors.rows_first = true;
  family.tensors.shared_gate_up = "shared_mlp.input_linear";
  family.tensors.shared_down = "shared_mlp.output_linear";
  return family;
}

void read_granite_moe(ConfigFields& fields, ModelConfig& config) {
  read_granite(fields, config);
  read_experts_everywhere(fields, 2, config);
}

void read_shared_granite_moe(ConfigFields& fields, ModelConfig& config) {
  read_granite_moe(fields, config);
  constexpr const char* field = "shared_intermediate_size";
  const nlohmann::json* const width = fields.get(field);
  if (width == nullptr || *width == 0) return;
  config.experts->shared_intermediate_size = fields.size(field, max_size);
}

/// Reads the base of each layer; 0: no RoPE. Layers with a window may have one of their own.
void read_layer_thetas(ConfigFields& fields, ModelConfig& config) {
  constexpr const char* field = "layer_rope_theta";
  const nlohmann::json* const thetas = fields.get(field);
  if (thetas == nullptr) return;
  const auto is_base = [](const nlohmann::json& theta) {
    return theta.is_number() && (theta == 0 || theta >= 1) && theta <= 1e30;
  };
  if (!thetas->is_array() || thetas->size() != config.layers.size() ||
      !std::all_of(thetas->begin(), thetas->end(), is_base)) {
    fields.fail(field, fmt::format("an array of {} numbers, 0 or from 1", config.layers.size()),
                files::described(*thetas));
  }
  std::optional<double> full, window;
  for (std::size_t l = 0; l < config.layers.size(); ++l) {
    LayerConfig& layer = config.layers[l];
    const double theta = (*thetas)[l];
    layer.has_rope = theta != 0;
    if (!layer.has_rope) continue;
    std::optional<double>& of_kind = layer.window > 0 ? window : full;
    if (of_kind && *of_kind != theta) {
      fields.fail(field, "one base for layers with a window, and one for the others",
                  fmt::format("{} and {}", *of_kind, theta));
    }
    of_kind = theta;
  }
  config.rope_theta = full.value_or(window.value_or(config.rope_theta));
  if (!window || *window == config.rope_theta) return;
  if (config.rope_scaling) {
    fields.fail(field, "one base, as RoPE is scaled", fmt::format("{} and {}", *full, *window));
  }
  config.window_rope_theta = window;
}

/// Every fourth layer from the first one is full.
void read_granite_windows(ConfigFields& fields, ModelConfig& config) {
  config.has_sinks = true;
  std::vector<bool> slides;
  for (std::size_t l = 0; l < config.layers.size(); ++l) slides.push_back(l % 4 != 0);
  read_windows(fields, sliding_window_or(fields, 128), slides, config);
  read_layer_thetas(fields, config);
}

/// Layers with Mamba-2 or attention; experts beside a feed-forward part, or that part alone.
void read_granite_hybrid(ConfigFields& fields, ModelConfig& config) {
  read_granite(fields, config);
  read_state_space(fields, {}, config);
  constexpr const char* field = "layer_types";
  const std::vector<std::string> kinds = read_layer_kinds(
      fields, field, {{"mamba", "linear_attention"}, {"attention", "full_attention"}}, config);
  const bool has_rope = fields.find_text("position_embedding_type").value_or("") == "rope";
  for (std::size_t l = 0; l < config.layers.size(); ++l) {
    LayerConfig& layer = config.layers[l];
    layer.has_rope = has_rope;
    const std::string kind = kinds.empty() ? "linear_attention" : kinds[l];
    if (kind != "linear_attention" && kind != "full_attention") {
      fields.fail(field, "\"linear_attention\" or \"full_attention\"", files::in_quotes(kind));
    }
    if (kind == "linear_attention") layer.mixing = TokenMixing::state_space;
  }
  const std::int64_t width = fields.find_size("shared_intermediate_size", max_size).value_or(1024);
  constexpr const char* count = "num_local_experts";
  const nlohmann::json* const experts = fields.get(count);
  if (experts != nullptr && *experts == 0) {
    fields.get("num_experts_per_tok");
    config.intermediate_size = width;
    return;
  }
  read_experts_everywhere(fields, 2, config);
  config.experts->shared_intermediate_size = width;
}

}  // namespace

const Family granite = [] {
  Family family = granite_family();
  family.class_name = "GraniteForCausalLM";
  family.model_type = "granite";
  family.text_defaults =
      R"({"vocab_size":32000,"hidden_size":4096,"intermediate_size":11008,"num_hidden_layers":32,)"
      R"("num_attention_heads":32,"max_position_embeddings":2048})";
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_granite(fields, config);
    config.mlp_bias = fields.flag("mlp_bias", false);
  };
  return family;
}();

const Family granitemoe = [] {
  Family family = granite_moe_family();
  family.class_name = "GraniteMoeForCausalLM";
  family.model_type = "granitemoe";
  family.read = read_granite_moe;
  return family;
}();

const Family granitemoeshared = [] {
  Family family = granite_moe_family();
  family.class_name = "GraniteMoeSharedForCausalLM";
  family.model_type = "granitemoeshared";
  family.read = read_shared_granite_moe;
  return family;
}();

const Family granitemoehybrid = [] {
  Family family = granite_moe_family();
  family.class_name = "GraniteMoeHybridForCausalLM";
  family.model_type = "granitemoehybrid";
  family.read = read_granite_hybrid;
  family.tensors.feed_forward = "shared_mlp";
  family.tensors.gate_up = "shared_mlp.input_linear";
  family.tensors.down = "output_linear";
  return family;
}();

const Family granite_swa = [] {
  Family family = granite_family();
  family.class_name = "GraniteSWAForCausalLM";
  family.model_type = "granite_swa";
  family.default_key_value_heads = 4;
  family.default_norm_eps = 1e-5;
  family.ties_by_default = true;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_granite(fields, config);
    config.mlp_bias = fields.flag("mlp_bias", false);
    read_granite_windows(fields, config);
  };
  return family;
}();

const Family granitemoe_swa = [] {
  Family family = granite_moe_family();
  family.class_name = "GraniteMoeSWAForCausalLM";
  family.model_type = "granitemoe_swa";
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_shared_granite_moe(fields, config);
    read_granite_windows(fields, config);
  };
  family.tensors.router = "block_sparse_moe.router";
  family.tensors.experts_gate_up = "block_sparse_moe.experts.gate_up_proj";
  family.tensors.experts_down = "block_sparse_moe.experts.down_proj";
  return family;
}();

}  // namespace kvzap::model
