// Jamba: state spaces of Mamba-1 in most layers, attention in the others; experts in some.
#include <fmt/format.h>

#include <cmath>

#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

/// Calls mark(layer) for each layer whose number divided by a period leaves an offset.
template <class Mark>
void mark_layers(ConfigFields& fields, const std::string& kind, std::int64_t default_period,
                 double default_offset, ModelConfig& config, const Mark& mark) {
  const std::string offset_field = kind + "_layer_offset";
  const std::int64_t period =
      fields.find_size(kind + "_layer_period", max_size).value_or(default_period);
  const double offset = fields.find_number(offset_field, 0, max_size).value_or(default_offset);
  if (offset >= static_cast<double>(period) || offset != std::floor(offset)) {
    fields.fail(offset_field,
                fmt::format("a whole number below {}_layer_period ({})", kind, period),
                fmt::format("{}", offset));
  }
  for (auto l = static_cast<std::int64_t>(offset); l < config.num_hidden_layers; l += period) {
    mark(config.layers[static_cast<std::size_t>(l)]);
  }
}

void read_jamba(ConfigFields& fields, ModelConfig& config) {
  read_mamba1(fields, 1, "", config);
  config.state_space->norms_latents = true;
  for (LayerConfig& layer : config.layers) {
    layer.mixing = TokenMixing::state_space;
    layer.has_rope = false;
  }
  mark_layers(fields, "attn", 8, 4, config,
              [](LayerConfig& layer) { layer.mixing = TokenMixing::attention; });
  for (const char* of_others :
       {"use_mamba_kernels", "use_mambapy", "use_associative_scan", "mamba_inner_layernorms",
        "calc_logits_for_entire_prompt", "num_logits_to_keep", "n_ctx"}) {
    fields.get(of_others);
  }
  fields.require_none("sliding_window");
  const std::int64_t experts = fields.find_size("num_experts", max_size).value_or(16);
  const auto mark_experts = [&](LayerConfig& layer) { layer.has_experts = experts > 1; };
  mark_layers(fields, "expert", 2, 1, config, mark_experts);
  fields.get("num_experts_per_tok");
  if (experts > 1) config.experts = read_experts(fields, "num_experts", 2, config);
}

}  // namespace

const Family jamba = [] {
  Family family;
  family.class_name = "JambaForCausalLM";
  family.model_type = "jamba";
  family.tested = family_tests;
  family.default_key_value_heads = 8;
  family.rename = [](ConfigContent& content) {
    if (!content.contains("num_experts")) rename_field(content, "num_local_experts", "num_experts");
    if (!content.contains("num_experts")) content["num_experts"] = 16;
  };
  family.read = read_jamba;
  family.tensors.final_norm = "model.final_layernorm";
  family.tensors.feed_forward_in = "pre_ff_layernorm";
  family.tensors.feed_forward = "feed_forward";
  family.tensors.router = "feed_forward.router";
  family.tensors.expert_gate = "feed_forward.experts.{}.gate_proj";
  family.tensors.expert_up = "feed_forward.experts.{}.up_proj";
  family.tensors.expert_down = "feed_forward.experts.{}.down_proj";
  return family;
}();

}  // namespace kvzap::model
