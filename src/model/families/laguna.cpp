// Laguna of Poolside: a gate for each head of attention, more query heads in layers with windows,
// experts chosen by sigmoids.
#include <fmt/format.h>

#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

using nlohmann::json;

/// Sets the query heads of the layers: those of full layers are the model's.
void read_query_heads(ConfigFields& fields, ModelConfig& config) {
  constexpr const char* field = "num_attention_heads_per_layer";
  const json* const counts = fields.get(field);
  if (counts == nullptr) return;
  if (!counts->is_array() || counts->size() != config.layers.size()) {
    fields.fail(field, fmt::format("an array of {} numbers", config.layers.size()),
                files::described(*counts));
  }
  set_query_heads(fields, field, *counts, config);
}

void read_gates(ConfigFields& fields, ModelConfig& config) {
  constexpr const char* field = "gating";
  config.gates_attention = config.gates_heads = config.has_softplus_gates = true;
  const json* const gating = fields.get(field);
  if (gating == nullptr || *gating == true || *gating == "per-head") return;
  if (*gating != "per-element" && *gating != false) {  // both of each dimension
    fields.fail(field, "true, false, \"per-head\" or \"per-element\"", files::described(*gating));
  }
  config.gates_heads = false;
}

void read_laguna_experts(ConfigFields& fields, ModelConfig& config) {
  ExpertsConfig experts = read_experts(fields, "num_experts", 8, config);
  experts.intermediate_size = fields.find_size("moe_intermediate_size", max_size).value_or(512);
  experts.shared_intermediate_size =
      fields.find_size("shared_expert_intermediate_size", max_size).value_or(512);
  experts.scores = ExpertsConfig::Scores::sigmoid;
  experts.has_correction = experts.normalises = true;
  experts.scale = read_multiplier(fields, "moe_routed_scaling_factor");
  fields.require("moe_apply_router_weight_on_input", false);
  fields.require("moe_router_logit_softcapping", 0);
  config.experts = experts;
  for (std::size_t l = 1; l < config.layers.size(); ++l) config.layers[l].has_experts = true;
  read_sparse_types(fields, config);
}

}  // namespace

const Family laguna = [] {
  Family family;
  family.class_name = "LagunaForCausalLM";
  family.model_type = "laguna";
  family.tested = family_tests;
  family.default_key_value_heads = 8;
  family.default_head_dim = 128;
  family.rope.default_theta = 5e5;
  family.rope.default_rotary_factor = 0.5;
  family.rope.default_window_theta = 1e4;
  family.rope.default_window_factor = 1;
  family.rename = [](ConfigContent& content) {
    // In parameters that the file states, an absent factor is 1.
    const auto rope = content.find("rope_parameters");
    if (rope == content.end() || !rope->is_object()) return;
    const auto full = rope->find("full_attention");
    constexpr const char* factor = "partial_rotary_factor";
    if (full != rope->end() && full->is_object() && !full->contains(factor)) (*full)[factor] = 1;
  };
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.qk_norm = QkNorm::head;
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
    const std::vector<bool> none(config.layers.size(), false);
    read_windows(fields, sliding_window_or(fields, 512), none, config);
    read_query_heads(fields, config);
    read_gates(fields, config);
    read_laguna_experts(fields, config);
  };
  family.tensors.attention_gate = "self_attn.g_proj";
  family.tensors.correction = "mlp.experts.e_score_correction_bias";
  family.tensors.shared = "mlp.shared_expert";
  return family;
}();

}  // namespace kvzap::model
