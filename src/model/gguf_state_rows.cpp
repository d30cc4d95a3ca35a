// Rows of families whose layers keep states: short convolutions and state spaces.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "gguf/tensor_names.hpp"
#include "model/families/family.hpp"
#include "model/gguf_rows.hpp"

namespace kvzap::model {

using nlohmann::json;

namespace {

/// Programs do not limit steps, and need a bias of convolutions.
void space_rows(GgufFields& f, const StateSpaceFields& fields) {
  constexpr const char* inner_key = "ssm.inner_size";
  constexpr std::int64_t most = 65536;
  const StateSpaceConfig& space = *f.model.state_space;
  f.integer("ssm.conv_kernel", fields.kernel, space.kernel, most);
  f.integer("ssm.state_size", fields.state_dim, space.state_dim, most);
  f.integer("ssm.group_count", fields.groups, space.groups, most);
  f.integer("ssm.time_step_rank", fields.heads, space.heads, most);
  f.integer(inner_key, fields.head_dim, space.inner_size());
  const std::int64_t heads = f.size(fields.heads), inner = f.size(fields.head_dim);
  if (inner % heads != 0) {
    f.fail_key(inner_key, fmt::format("a multiple of ssm.time_step_rank ({})", heads),
               fmt::format("{}", inner));
  }
  f.config[fields.head_dim] = inner / heads;
  f.convolution_bias = true;
  f.implied(fields.convolution_bias, true, space.has_convolution_bias);
  f.implied(fields.projection_bias, false, space.has_projection_bias);
  f.demand("time_step_limit", 0.0, space.largest_step);
}

void no_least_step(GgufFields& f) {
  f.demand("time_step_limit", 0.0, f.model.state_space->least_step);
}

/// Layers without attention have `other`.
void layer_types(GgufFields& f, const char* other) {
  json types = json::array();
  for (const bool attends : f.layers_attend) types.push_back(attends ? "full_attention" : other);
  f.config["layer_types"] = std::move(types);
}

void lfm_rows(GgufFields& f) {
  f.config.erase("hidden_act");
  f.integer("shortconv.l_cache", "conv_L_cache", f.model.short_convolution->kernel,
            DeltaNetConfig::max_kernel);
  f.implied("conv_bias", false, f.model.short_convolution->has_bias);
  f.require_key(window_key, 0);
  layer_types(f, "conv");
}

/// Layers with a part are those whose number divided by a period leaves an offset. `key` is named
/// if they are others.
void periodic_layers(GgufFields& f, const std::string& part, const std::vector<bool>& have_it,
                     const char* key) {
  std::vector<std::int64_t> found;
  for (std::size_t l = 0; l < have_it.size(); ++l) {
    if (have_it[l]) found.push_back(static_cast<std::int64_t>(l));
  }
  const std::int64_t offset = found.empty() ? f.layers : found.front();
  const std::int64_t period = found.size() > 1 ? found[1] - offset : f.layers + 1;
  bool is_periodic = offset < period;
  for (std::int64_t l = 0; l < f.layers; ++l) {
    is_periodic = is_periodic && have_it[static_cast<std::size_t>(l)] == (l % period == offset);
  }
  if (!is_periodic) {
    constexpr std::size_t shown = 8;
    found.resize(std::min(found.size(), shown));
    f.fail_key(key, fmt::format("{} in layers at one distance, the first one below it", part),
               fmt::format("layers {}", fmt::join(found, ", ")));
  }
  f.config[part + "_layer_offset"] = offset;
  f.config[part + "_layer_period"] = period;
}

/// Layers with experts have a router. Weights of experts are not divided by their sum.
void jamba_experts(GgufFields& f) {
  constexpr const char* count_key = "expert_count";
  std::vector<bool> have_experts;
  for (std::int64_t l = 0; f.reads() && l < f.layers; ++l) {
    have_experts.push_back(f.tensor(gguf::name_in_layer(l, "ffn_gate_inp.weight")) != nullptr);
  }
  const bool has_any =
      f.reads() ? std::find(have_experts.begin(), have_experts.end(), true) != have_experts.end()
                : f.model.experts.has_value();
  f.require_key("expert_weights_norm", false);
  if (has_any) {
    experts(f, "num_experts", softmax, dense_width);
    if (f.reads()) periodic_layers(f, "expert", have_experts, count_key);
    return;
  }
  for (const char* key : {count_key, "expert_used_count"}) f.find_integer(key, 0);
  f.config["num_experts"] = 1;
}

}  // namespace

void lfm2_rows(GgufFields& f) {
  lfm_rows(f);
  f.config["block_auto_adjust_ff_dim"] = false;
}

void lfm2moe_rows(GgufFields& f) {
  const ExpertsConfig& of_model = *f.model.experts;
  lfm_rows(f);
  experts(f, "num_experts", sigmoid, own_width);
  const std::int64_t first = leading_dense_layers(f.model);
  f.integer_or("leading_dense_block_count", "num_dense_layers", 0, first);
  f.implied("norm_topk_prob", true, of_model.normalises);
  f.implied("use_expert_bias", true, of_model.has_correction);
  f.implied("routed_scaling_factor", 1.0, of_model.scale);
}

void granitehybrid_rows(GgufFields& f) {
  constexpr const char* shared_field = "shared_intermediate_size";
  constexpr const char* rope_key = "rope.scaling.finetuned";
  const bool has_rope = f.metadata().find_flag(f.read(rope_key)).value_or(true);
  granite_factors(f);
  attention_bias(f, true);
  space_rows(f, {});
  no_least_step(f);
  layer_types(f, "linear_attention");
  if (has_rope) f.config["position_embedding_type"] = "rope";
  f.add(rope_key, f.model.layer(0).has_rope);
  f.config["mamba_expand"] = 2;
  f.require(f.model.state_space->inner_size() == 2 * f.model.hidden_size, "mamba_expand", "2",
            "another number");
  if (!f.architecture.has_experts.value()) {
    f.config[shared_field] = f.config["intermediate_size"];
    f.config["num_local_experts"] = 0;
    return;
  }
  experts(f, "num_local_experts", softmax, only_width);
  f.require_key("expert_weights_norm", true);
  f.integer(shared_width_key, shared_field, f.model.experts->shared_intermediate_size);
}

/// The file's weights include all factors.
void falcon_h1_rows(GgufFields& f) {
  const StateSpaceConfig& space = *f.model.state_space;
  no_attention_bias(f);
  f.config["mlp_bias"] = f.mlp_bias = f.has_in_layers("ffn_gate.bias");
  space_rows(f, {});
  no_least_step(f);
  f.config["mamba_d_ssm"] = f.size("mamba_n_heads") * f.size("mamba_d_head");
  f.config["mamba_rms_norm"] = f.has_in_layers("ssm_norm.weight");
  f.implied("mamba_norm_before_gate", false,
            space.gating == StateSpaceConfig::Gating::norm_before_gate);
}

void nemotron_h_rows(GgufFields& f) {
  constexpr double least_step = 0.001;  // of published models, and of the class
  const bool has_experts = f.architecture.has_experts.value();
  StateSpaceFields names;
  names.heads = "mamba_num_heads";
  names.head_dim = "mamba_head_dim";
  names.groups = "n_groups";
  names.state_dim = "ssm_state_size";
  names.kernel = "conv_kernel";
  names.convolution_bias = "use_conv_bias";
  names.projection_bias = "use_bias";
  space_rows(f, names);
  f.config.erase("hidden_act");
  f.config["mlp_hidden_act"] = "relu2";
  f.require(f.model.activation == Activation::relu2, "mlp_hidden_act", "relu2", "another one");
  f.implied("time_step_min", least_step, f.model.state_space->least_step);
  f.config["mlp_bias"] = f.mlp_bias = f.has_in_layers("ffn_up.bias");
  json kinds = json::array();
  for (std::size_t l = 0; l < f.layers_attend.size(); ++l) {
    const char* const mixer = f.layers_attend[l] ? "full_attention" : "linear_attention";
    kinds.push_back(!f.layers_feed_forward[l] ? mixer : has_experts ? "moe" : "mlp");
  }
  f.config["layers_block_type"] = std::move(kinds);
  for (const LayerConfig& layer : f.model.layers) {
    f.require(!layer.has_feed_forward || layer.has_experts == has_experts, "layers_block_type",
              "either \"mlp\" or \"moe\" in all feed-forward parts", "both");
  }
  if (!has_experts) return;
  const ExpertsConfig& of_model = *f.model.experts;
  experts(f, "n_routed_experts", sigmoid, own_width);
  f.integer(shared_width_key, "moe_shared_expert_intermediate_size",
            of_model.shared_intermediate_size);
  f.integer("expert_shared_count", "n_shared_experts", 1);
  f.factor("expert_weights_scale", "routed_scaling_factor", 1, of_model.scale);
  f.flag("expert_weights_norm", "norm_topk_prob", of_model.normalises);
  expert_groups(f);
  f.require_key("moe_latent_size", 0);
}

/// No layer has RoPE.
void jamba_rows(GgufFields& f) {
  constexpr const char* inner_key = "ssm.inner_size";
  constexpr std::int64_t most = 65536;
  const StateSpaceConfig& space = *f.model.state_space;
  for (const char* field : {"rope_theta", "rope_scaling"}) f.config.erase(field);
  f.require(f.model.activation == Activation::silu, "hidden_act", "silu", "another one");
  f.require(f.model.num_attention_heads * f.model.head_dim == f.model.hidden_size, "head_dim",
            "hidden_size / num_attention_heads", fmt::format("{}", f.model.head_dim));
  f.integer("ssm.conv_kernel", "mamba_d_conv", space.kernel, DeltaNetConfig::max_kernel);
  f.integer("ssm.state_size", "mamba_d_state", space.state_dim, most);
  f.integer("ssm.time_step_rank", "mamba_dt_rank", space.step_rank, most);
  f.config["mamba_expand"] = 2;
  f.require(space.inner_size() == 2 * f.model.hidden_size, "mamba_expand", "2", "another number");
  f.require_key(inner_key, 2 * f.size("hidden_size"));
  f.add(inner_key, space.inner_size());
  f.convolution_bias = true;
  f.implied("mamba_conv_bias", true, space.has_convolution_bias);
  f.implied("mamba_proj_bias", false, space.has_projection_bias);
  if (f.reads()) periodic_layers(f, "attn", f.layers_attend, "attention.head_count_kv");
  jamba_experts(f);
}

}  // namespace kvzap::model
