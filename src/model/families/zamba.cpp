// Zamba and Zamba2: state spaces, some of which read a transformer block as well, whose weights
// several layers share.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

using nlohmann::json;

constexpr const char* blocks_field = "layers_block_type";

/// Sets the sizes that follow from others: heads of attention, which reads two vectors.
void rename_zamba(ConfigContent& content) {
  rename_field(content, "layer_types", blocks_field);
  for (const char* field : {"intermediate_size", "attention_head_dim"}) {
    if (content.contains(field) && content[field].is_null()) content.erase(field);
  }
  default_width(content);
  const auto is_size = [&](const char* field) {
    return content.contains(field) && content[field].is_number_unsigned() && content[field] >= 1 &&
           content[field] <= max_size;
  };
  rename_field(content, "attention_head_dim", "head_dim");
  if (content.contains("head_dim") || !is_size("hidden_size") || !is_size("num_attention_heads")) {
    return;
  }
  const auto heads = content["num_attention_heads"].get<std::int64_t>();
  content["head_dim"] =
      std::max<std::int64_t>(1, 2 * content["hidden_size"].get<std::int64_t>() / heads);
}

/// Gives each layer its kind, and those with a block the first one that has the same. `blocks`: how
/// many there are, dealt in turn. Without tie_word_embeddings transformers ties no blocks either:
/// each layer has a block of its own.
void set_kinds(ConfigFields& fields, const std::vector<bool>& has_block, std::int64_t blocks,
               ModelConfig& config) {
  std::vector<std::int64_t> owners;
  std::int64_t number = 0;
  for (std::size_t l = 0; l < config.layers.size(); ++l) {
    LayerConfig& layer = config.layers[l];
    layer.has_feed_forward = has_block[l];
    layer.mixing =
        has_block[l] ? TokenMixing::attention_into_state_space : TokenMixing::state_space;
    if (!has_block[l]) continue;
    if (number < blocks || !config.tie_word_embeddings) {
      owners.push_back(static_cast<std::int64_t>(l));
    } else {
      layer.weights_of = owners[static_cast<std::size_t>(number % blocks)];
    }
    ++number;
  }
  if (number == 0) fields.fail(blocks_field, "at least one \"hybrid\" layer", "none");
}

/// Returns which layers have a block, by layers_block_type; nothing without the field.
std::vector<bool> read_kinds(ConfigFields& fields, const ModelConfig& config) {
  const std::vector<std::string> kinds =
      read_layer_kinds(fields, blocks_field, {{"mamba", "linear_attention"}}, config);
  std::vector<bool> has_block;
  if (kinds.empty()) return has_block;
  for (const std::string& kind : kinds) {
    if (kind != "hybrid" && kind != "linear_attention") {
      fields.fail(blocks_field, R"("linear_attention" or "hybrid")", files::in_quotes(kind));
    }
    has_block.push_back(kind == "hybrid");
  }
  return has_block;
}

/// What both classes have.
void read_blocks(ConfigFields& fields, ModelConfig& config) {
  constexpr const char* inputs_field = "attention_hidden_size";
  config.activation = read_activation(fields, "hidden_act", Activation::gelu);
  config.attention_multiplier = 1 / std::sqrt(static_cast<double>(config.head_dim) / 2);
  config.shared_blocks = SharedBlocksConfig{};
  if (const auto inputs = fields.find_size(inputs_field, max_size);
      inputs && *inputs != 2 * config.hidden_size) {
    fields.fail(inputs_field, fmt::format("2 hidden_size ({})", 2 * config.hidden_size),
                fmt::format("{}", *inputs));
  }
  for (const char* of_others : {"layer_types", "attention_head_dim", "num_logits_to_keep",
                                "time_step_max", "time_step_floor", "use_mamba_kernels",
                                "use_associative_scan", "calc_logits_for_entire_prompt"}) {
    fields.get(of_others);
  }
}

void read_zamba(ConfigFields& fields, ModelConfig& config) {
  constexpr const char* groups_field = "n_mamba_heads";
  constexpr const char* offset_field = "attn_layer_offset";
  read_blocks(fields, config);
  fields.require("hidden_mamba_act", "silu");
  fields.get("time_step_min");  // of new weights
  read_mamba1(fields, fields.find_size(groups_field, 65536).value_or(2), groups_field, config);
  for (LayerConfig& layer : config.layers) layer.has_rope = false;
  const std::int64_t period = fields.find_size("attn_layer_period", max_size).value_or(6);
  const double offset = fields.find_number(offset_field, 0, max_size).value_or(4);
  std::vector<bool> has_block = read_kinds(fields, config);
  for (std::int64_t l = 0; has_block.size() < config.layers.size(); ++l) {
    // The first three layers precede the pattern.
    has_block.push_back(l < 3 ? l == 2 : static_cast<double>((l - 3) % period) == offset);
  }
  set_kinds(fields, has_block, 1, config);
}

void read_zamba2(ConfigFields& fields, ModelConfig& config) {
  constexpr std::int64_t default_blocks[] = {6, 12, 18, 24, 30, 36, 42, 47, 51};
  constexpr const char* kv_field = "num_key_value_heads";
  read_blocks(fields, config);
  StateSpaceFields names;
  names.heads = "n_mamba_heads";
  names.head_dim = "mamba_headdim";
  names.groups = "mamba_ngroups";
  names.convolution_bias = "use_conv_bias";
  names.projection_bias = "add_bias_linear";
  names.chunk = "chunk_size";
  names.default_heads = 8;
  names.default_state_dim = 64;
  read_state_space(fields, names, config);
  StateSpaceConfig& space = *config.state_space;
  space.has_convolution_bias = true;  // whatever use_conv_bias says
  space.least_step = fields.find_number("time_step_min", 0, 1e30).value_or(0.001);
  space.largest_step = 0;
  space.norm_eps = 1e-5;
  config.mlp_bias = space.has_projection_bias;

  const bool has_rope = fields.flag("use_mem_rope", false);
  for (LayerConfig& layer : config.layers) layer.has_rope = has_rope;
  if (fields.flag("use_long_context", false)) config.max_position_embeddings = 16384;
  SharedBlocksConfig& blocks = *config.shared_blocks;
  const std::int64_t rank = fields.find_size("adapter_rank", 65536).value_or(128);
  blocks.feed_forward_rank = rank;
  if (fields.flag("use_shared_attention_adapter", false)) {
    blocks.attention_rank = rank;
    if (config.num_key_value_heads != config.num_attention_heads) {
      fields.fail(kv_field,
                  fmt::format("num_attention_heads ({}), as attention has adapters",
                              config.num_attention_heads),
                  fmt::format("{}", config.num_key_value_heads));
    }
  }
  for (const char* of_others :
       {"kv_channels", "num_query_groups", "hybrid_layer_ids", "use_mem_eff_path"}) {
    fields.get(of_others);
  }
  std::vector<bool> has_block = read_kinds(fields, config);
  if (has_block.empty()) {
    if (config.num_hidden_layers != 54) {
      fields.fail(blocks_field, fmt::format("the kinds of {} layers", config.num_hidden_layers),
                  "none");
    }
    has_block.resize(config.layers.size(), false);
    for (const std::int64_t l : default_blocks) has_block[static_cast<std::size_t>(l)] = true;
  }
  set_kinds(fields, has_block, fields.find_size("num_mem_blocks", 65536).value_or(1), config);
}

Family zamba_family() {
  Family family;
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.ties_by_default = true;
  family.rename = rename_zamba;
  family.tensors.final_norm = "model.final_layernorm";
  family.tensors.feed_forward_in = "pre_ff_layernorm";
  family.tensors.feed_forward = "feed_forward";
  return family;
}

}  // namespace

const Family zamba = [] {
  Family family = zamba_family();
  family.class_name = "ZambaForCausalLM";
  family.model_type = "zamba";
  family.default_key_value_heads = 16;
  family.read = read_zamba;
  family.tensors.shared_block = "shared_transf";
  family.tensors.space_by_group = true;
  family.tensors.space_latents = "x_proj_weight";
  family.tensors.space_steps = "dt_proj_weight";
  family.tensors.space_shifts = "dt_proj_bias";
  return family;
}();

const Family zamba2 = [] {
  Family family = zamba_family();
  family.class_name = "Zamba2ForCausalLM";
  family.model_type = "zamba2";
  family.read = read_zamba2;
  family.tensors.shared_block = "shared_transformer";
  family.tensors.gate_up = "feed_forward.gate_up_proj";
  family.tensors.qkv_adapters = {"self_attn.linear_q_adapter_list.{}",
                                 "self_attn.linear_k_adapter_list.{}",
                                 "self_attn.linear_v_adapter_list.{}"};
  family.tensors.gate_up_adapter = "feed_forward.gate_up_proj_adapter_list.{}";
  return family;
}();

}  // namespace kvzap::model
