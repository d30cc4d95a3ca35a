// Families with state spaces: the fields that they share, Bamba and Nemotron-H.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "model/families/families.hpp"

namespace kvzap::model {

using nlohmann::json;

namespace {

/// A bound of a step; infinity is a name (gguf::read_model_file), or as transformers 5 writes it.
double step_limit(ConfigFields& fields, const char* field, const json& value) {
  const bool is_object = value.is_object() && value.size() == 1 && value.contains("__float__");
  const json& number = is_object ? value.at("__float__") : value;
  if (number.is_string() && number.get<std::string>() == "Infinity") {
    return std::numeric_limits<double>::infinity();
  }
  if (number.is_number() && number >= 0 && number <= 1e30) return number;
  fields.fail(field, "two numbers from 0 on, the second perhaps infinite", files::described(value));
}

void read_step_limits(ConfigFields& fields, StateSpaceConfig& space) {
  constexpr const char* field = "time_step_limit";
  const json* const limits = fields.get(field);
  if (limits == nullptr) return;
  if (!limits->is_array() || limits->size() != 2) {
    fields.fail(field, "two numbers", files::described(*limits));
  }
  space.least_step = step_limit(fields, field, (*limits)[0]);
  const double largest = step_limit(fields, field, (*limits)[1]);
  if (std::isinf(space.least_step) || largest == 0) {
    fields.fail(field, "a finite number and one above zero", limits->dump());
  }
  space.largest_step = std::isinf(largest) ? 0 : largest;
}

/// Throws Error for sizes that do not fit together, or that no memory could hold.
void check_space(ConfigFields& fields, const StateSpaceFields& names,
                 const StateSpaceConfig& space) {
  if (space.heads % space.groups != 0) {
    fields.fail(names.groups, fmt::format("a divisor of {} ({})", names.heads, space.heads),
                fmt::format("{}", space.groups));
  }
  // Heads, groups and state_dim are at most 2^16, so no product overflows.
  if (space.heads * space.head_dim > max_size / space.state_dim ||
      space.groups * space.state_dim > max_size / 4 || space.inner_size() > max_size / 4) {
    fields.fail(names.heads, fmt::format("states of at most {} values in a layer", max_size),
                fmt::format("{} of {} x {}", space.heads, space.head_dim, space.state_dim));
  }
}

constexpr const char* kinds_field = "layers_block_type";

/// Names of files from before transformers had the class: a letter for each layer, and the fields
/// of other families. The number of layers is that of the list.
void rename_nemotron_h(ConfigContent& content) {
  constexpr std::pair<char, const char*> letters[] = {
      {'M', "linear_attention"}, {'E', "moe"}, {'*', "full_attention"}, {'-', "mlp"}};
  constexpr const char* pattern_field = "hybrid_override_pattern";
  const bool has_kinds = content.contains(kinds_field) && !content[kinds_field].is_null();
  if (!has_kinds && content.contains(pattern_field) && content[pattern_field].is_string()) {
    json kinds = json::array();
    for (const char letter : content[pattern_field].get<std::string>()) {
      std::string kind(1, letter);  // an error later, unless it is one of these
      for (const auto& [of_kind, name] : letters) {
        if (letter == of_kind) kind = name;
      }
      kinds.push_back(kind);
    }
    content[kinds_field] = kinds;
    content.names_in_file[kinds_field] = pattern_field;
  }
  rename_field(content, "layer_types", kinds_field);
  constexpr std::pair<const char*, const char*> older[] = {{"mamba_n_groups", "n_groups"},
                                                           {"mamba_d_conv", "conv_kernel"},
                                                           {"mamba_dt_min", "time_step_min"},
                                                           {"mamba_conv_bias", "use_conv_bias"},
                                                           {"mamba_chunk_size", "chunk_size"}};
  for (const auto& [own, name] : older) rename_field(content, own, name);
  if (content.contains(kinds_field) && content[kinds_field].is_array()) {
    content["num_hidden_layers"] = content[kinds_field].size();
  } else if (!content.contains("num_hidden_layers")) {
    content["num_hidden_layers"] = 1;  // read_single_parts asks for the list
  }
}

/// Each layer is one of state space, attention, feed-forward part and experts.
bool read_single_parts(ConfigFields& fields, ModelConfig& config) {
  const std::vector<std::string> kinds =
      read_layer_kinds(fields, kinds_field,
                       {{"mamba", "linear_attention"}, {"attention", "full_attention"}}, config);
  if (kinds.empty()) fields.fail(kinds_field, "an array of names", "none");
  bool has_experts = false;
  for (std::size_t l = 0; l < kinds.size(); ++l) {
    LayerConfig& layer = config.layers[l];
    const bool mixes_channels = kinds[l] == "mlp" || kinds[l] == "moe";
    layer.has_feed_forward = mixes_channels;
    layer.has_experts = kinds[l] == "moe";
    layer.has_rope = false;
    has_experts = has_experts || layer.has_experts;
    if (mixes_channels) {
      layer.mixing = TokenMixing::none;
    } else if (kinds[l] == "linear_attention") {
      layer.mixing = TokenMixing::state_space;
    } else if (kinds[l] != "full_attention") {
      // In parentheses: the letters of hybrid_override_pattern.
      constexpr const char* known =
          R"("linear_attention" (M), "full_attention" (*), "mlp" (-) or "moe" (E))";
      fields.fail(kinds_field, known, files::in_quotes(kinds[l]));
    }
  }
  return has_experts;
}

void read_nemotron_experts(ConfigFields& fields, ModelConfig& config) {
  fields.require_none("moe_latent_size");
  GroupedExperts rules;
  rules.default_per_token = 2;
  rules.default_width = 7688;
  read_grouped_experts(fields, rules, config);
  // One expert of this width serves all tokens, whatever n_shared_experts says.
  config.experts->shared_intermediate_size =
      fields.find_size("moe_shared_expert_intermediate_size", max_size).value_or(7688);
}

void read_nemotron_h(ConfigFields& fields, ModelConfig& config) {
  config.gates_feed_forward = false;
  config.activation = read_activation(fields, "mlp_hidden_act", Activation::relu2);
  fields.require("mamba_hidden_act", "silu");
  fields.get("num_nextn_predict_layers");  // for speculation
  ignore_bias(fields, "attention_bias", config);
  StateSpaceFields names;
  names.heads = "mamba_num_heads";
  names.head_dim = "mamba_head_dim";
  names.groups = "n_groups";
  names.state_dim = "ssm_state_size";
  names.kernel = "conv_kernel";
  names.convolution_bias = "use_conv_bias";
  names.projection_bias = "use_bias";
  names.chunk = "chunk_size";
  names.default_groups = 8;
  names.default_state_dim = 128;
  names.inner = nullptr;
  read_state_space(fields, names, config);
  // The class takes this bound instead of those of time_step_limit.
  config.state_space->least_step = fields.find_positive("time_step_min").value_or(0.001);
  config.state_space->largest_step = 0;
  for (const char* of_others : {"expand",
                                "mamba_proj_bias",
                                "mamba_ssm_cache_dtype",
                                "time_step_floor",
                                "time_step_max",
                                "hidden_dropout",
                                "hybrid_override_pattern",
                                "moe_shared_expert_overlap",
                                "mtp_layers_block_type",
                                "mtp_hybrid_override_pattern",
                                "num_logits_to_keep",
                                "rescale_prenorm_residual",
                                "residual_in_fp32",
                                "use_mamba_kernels",
                                "mamba_expand",
                                "mamba_dt_max",
                                "mamba_dt_limit",
                                "mamba_dt_init_floor",
                                "sliding_window",
                                "layer_types",
                                "mamba_n_groups",
                                "mamba_d_conv",
                                "mamba_dt_min",
                                "mamba_conv_bias",
                                "mamba_chunk_size",
                                "rms_norm_eps"}) {
    fields.get(of_others);
  }
  const bool has_experts = read_single_parts(fields, config);
  config.mlp_bias = fields.flag("mlp_bias", false);
  for (const char* of_experts :
       {"n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size",
        "moe_shared_expert_intermediate_size", "moe_latent_size", "n_group", "topk_group",
        "norm_topk_prob", "routed_scaling_factor"}) {
    fields.get(of_experts);
  }
  if (!has_experts) return;
  if (config.mlp_bias) fields.fail("mlp_bias", "false, as there are experts", "true");
  read_nemotron_experts(fields, config);
}

}  // namespace

void read_state_space(ConfigFields& fields, const StateSpaceFields& names, ModelConfig& config) {
  constexpr std::int64_t most = 65536;
  StateSpaceConfig space;
  space.heads = fields.find_size(names.heads, most).value_or(names.default_heads);
  space.groups = fields.find_size(names.groups, most).value_or(names.default_groups);
  space.state_dim = fields.find_size(names.state_dim, most).value_or(names.default_state_dim);
  space.kernel = fields.find_size(names.kernel, DeltaNetConfig::max_kernel).value_or(4);
  space.has_convolution_bias = fields.flag(names.convolution_bias, true);
  space.has_projection_bias = fields.flag(names.projection_bias, false);
  const json* const dim = fields.get(names.head_dim);
  if (names.inner != nullptr && (dim == nullptr || *dim == "auto")) {
    space.head_dim = std::max<std::int64_t>(1, names.inner(fields, config) / space.heads);
  } else {
    space.head_dim = fields.find_size(names.head_dim, most).value_or(names.default_head_dim);
  }
  if (names.inner != nullptr && space.inner_size() != names.inner(fields, config)) {
    fields.fail(names.heads,
                fmt::format("heads that have {} channels together", names.inner(fields, config)),
                fmt::format("{} of {}", space.heads, space.head_dim));
  }
  check_space(fields, names, space);
  read_step_limits(fields, space);
  fields.get(names.chunk);  // the results do not depend on it
  config.state_space = space;
}

void read_mamba1(ConfigFields& fields, std::int64_t groups, const char* groups_field,
                 ModelConfig& config) {
  constexpr std::int64_t most = 65536;
  constexpr const char* rank_field = "mamba_dt_rank";
  const std::int64_t inner = expanded_size(fields, config);
  if (inner % groups != 0) {
    fields.fail(groups_field, fmt::format("a divisor of the {} channels", inner),
                fmt::format("{}", groups));
  }
  StateSpaceConfig space;
  space.groups = groups;
  // Channels that move between ranks together: as many as a kernel takes at once, or fewer.
  for (space.head_dim = 32; inner / groups % space.head_dim != 0;) --space.head_dim;
  space.heads = inner / space.head_dim;
  space.state_dim = fields.find_size("mamba_d_state", most).value_or(16);
  space.kernel = fields.find_size("mamba_d_conv", DeltaNetConfig::max_kernel).value_or(4);
  const json* const rank = fields.get(rank_field);
  space.step_rank = rank == nullptr || *rank == "auto" ? (config.hidden_size + 15) / 16
                                                       : fields.size(rank_field, most);
  space.has_convolution_bias = fields.flag("mamba_conv_bias", true);
  space.has_projection_bias = fields.flag("mamba_proj_bias", false);
  space.gating = StateSpaceConfig::Gating::gate;
  if (inner > max_size / 4 / space.state_dim || space.step_rank > max_size / inner ||
      groups > max_size / 4 / space.latents()) {
    fields.fail("mamba_expand", fmt::format("states of at most {} values in a layer", max_size / 4),
                fmt::format("{} channels, mamba_d_state {}, {} {}", inner, space.state_dim,
                            rank_field, space.step_rank));
  }
  config.state_space = space;
}

std::int64_t expanded_size(ConfigFields& fields, const ModelConfig& config) {
  return fields.find_size("mamba_expand", 1024).value_or(2) * config.hidden_size;
}

std::vector<std::string> read_layer_kinds(
    ConfigFields& fields, const char* field,
    const std::vector<std::pair<std::string_view, std::string_view>>& older,
    const ModelConfig& config) {
  std::vector<std::string> kinds;
  const json* const names = fields.get(field);
  if (names == nullptr) return kinds;
  if (!names->is_array()) fields.fail(field, "an array of names", files::described(*names));
  for (const json& name : *names) {
    if (!name.is_string()) fields.fail(field, "an array of names", files::described(name));
    kinds.push_back(name);
    for (const auto& [old, current] : older) {
      if (kinds.back() == old) kinds.back() = current;
    }
  }
  if (kinds.size() != config.layers.size()) {
    fields.fail(field, fmt::format("an array of {} names", config.layers.size()),
                fmt::format("{}", kinds.size()));
  }
  return kinds;
}

const Family bamba = [] {
  Family family;
  family.class_name = "BambaForCausalLM";
  family.model_type = "bamba";
  family.tested = family_tests;
  family.default_key_value_heads = 8;
  family.default_norm_eps = 1e-5;
  family.rope.default_rotary_factor = 0.5;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
    config.mlp_bias = fields.flag("mlp_bias", false);
    read_state_space(fields, {}, config);
    for (const char* of_training : {"z_loss_coefficient", "num_logits_to_keep"}) {
      fields.get(of_training);
    }
    constexpr const char* field = "attn_layer_indices";
    const json* const indices = fields.get(field);
    const auto count = static_cast<std::int64_t>(config.layers.size());
    for (LayerConfig& layer : config.layers) layer.mixing = TokenMixing::state_space;
    if (indices == nullptr) return;
    if (!indices->is_array()) fields.fail(field, "an array", files::described(*indices));
    for (const json& index : *indices) {
      if (!index.is_number_integer() || index < 0 || index >= count) {
        fields.fail(field, fmt::format("numbers of layers, 0 to {}", count - 1),
                    files::described(index));
      }
      config.layers[index.get<std::size_t>()].mixing = TokenMixing::attention;
    }
  };
  family.tensors.final_norm = "model.final_layernorm";
  family.tensors.feed_forward_in = "pre_ff_layernorm";
  family.tensors.feed_forward = "feed_forward";
  return family;
}();

const Family nemotron_h = [] {
  Family family;
  family.class_name = "NemotronHForCausalLM";
  family.model_type = "nemotron_h";
  family.tested = family_tests;
  family.default_key_value_heads = 8;
  family.default_head_dim = 128;
  family.default_norm_eps = 1e-5;
  family.norm_eps_field = "layer_norm_epsilon";
  family.rename = rename_nemotron_h;
  family.read = read_nemotron_h;
  family.tensors.layers = "backbone.layers.";
  family.tensors.embedding = "backbone.embeddings";
  family.tensors.final_norm = "backbone.norm_f";
  family.tensors.attention_in = "norm";
  family.tensors.feed_forward_in = "norm";
  family.tensors.query = "mixer.q_proj";
  family.tensors.key = "mixer.k_proj";
  family.tensors.value = "mixer.v_proj";
  family.tensors.output = "mixer.o_proj";
  family.tensors.state_space = "mixer";
  family.tensors.feed_forward = "mixer";
  family.tensors.router = "mixer.gate";
  family.tensors.correction = "mixer.gate.e_score_correction_bias";
  family.tensors.expert_up = "mixer.experts.{}.up_proj";
  family.tensors.expert_down = "mixer.experts.{}.down_proj";
  family.tensors.shared = "mixer.shared_experts";
  return family;
}();

}  // namespace kvzap::model
