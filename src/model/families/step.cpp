// Step-3.5-Flash of StepFun, and the text model of Step-3.7-Flash: more query heads in layers with
// windows, a gate for each head of attention, and limits of the feed-forward parts of some layers.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>
#include <system_error>

#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

using nlohmann::json;

constexpr double largest_step_limit = 1e6;
constexpr const char* step_kinds[] = {"full_attention", "sliding_attention"};

/// Returns a number of layers; 0 without the field.
std::uint64_t layers_in(const json& content, const char* field) {
  const auto found = content.find(field);
  const bool is_number = found != content.end() && found->is_number_unsigned();
  return is_number ? found->get<std::uint64_t>() : 0;
}

/// Lists of published files go on with the layers that predict further tokens, which are not read.
void drop_further_layers(json& content) {
  const std::uint64_t count = layers_in(content, "num_hidden_layers");
  const std::uint64_t further = layers_in(content, "num_nextn_predict_layers");
  for (const char* field : {"layer_types", "mlp_layer_types", "swiglu_limits",
                            "swiglu_limits_shared", "rope_theta", "partial_rotary_factors"}) {
    const auto list = content.find(field);
    if (list == content.end() || !list->is_array() || list->size() < count) continue;
    if (further == list->size() - count) list->get_ref<json::array_t&>().resize(count);
  }
}

/// Returns the value of a field in the layers of a kind, which may be a list of all layers; null
/// without the field. Different values become a list, which readers of numbers refuse.
json value_of_kind(const json& content, const char* field, const json& types, const char* kind) {
  const auto found = content.find(field);
  if (found == content.end() || !found->is_array()) {
    return found == content.end() ? json() : *found;
  }
  if (found->size() != types.size()) return *found;
  json values = json::array();
  // If the lists are longer, reading layer_types fails. Three values suffice for a message.
  const auto layers =
      std::min<std::uint64_t>(layers_in(content, "num_hidden_layers"), types.size());
  for (std::size_t l = 0; l < layers && values.size() < 3; ++l) {
    const json& value = (*found)[l];
    const bool is_new = std::find(values.begin(), values.end(), value) == values.end();
    if (types[l] == kind && is_new) values.push_back(value);
  }
  if (values.empty()) return {};
  return values.size() == 1 ? values[0] : values;
}

/// Published files state RoPE layer by layer. The parameters of each kind of layers, as newer files
/// have them, replace these fields.
void deal_rope(json& content) {
  constexpr const char* field = "rope_parameters";
  const auto types = content.find("layer_types");
  if (types == content.end() || !types->is_array()) return;
  if (content.contains(field) && !content[field].is_null()) return;
  json parameters;
  for (const char* kind : step_kinds) {
    if (std::find(types->begin(), types->end(), kind) == types->end()) continue;
    json own = json::object();
    const auto scaling = content.find("rope_scaling");
    if (kind == step_kinds[0] && scaling != content.end() && scaling->is_object()) own = *scaling;
    own["rope_theta"] = value_of_kind(content, "rope_theta", *types, kind);
    own["partial_rotary_factor"] = value_of_kind(content, "partial_rotary_factors", *types, kind);
    parameters[kind] = own;
  }
  if (parameters.is_null()) return;
  content[field] = parameters;
  for (const char* older : {"rope_theta", "partial_rotary_factors"}) content.erase(older);
  if (parameters.contains(step_kinds[0])) content.erase("rope_scaling");
}

void rename_step(ConfigContent& content) {
  rename_field(content, "num_attention_groups", "num_key_value_heads");
  for (const char* own : {"num_local_experts", "moe_num_experts"}) {
    rename_field(content, own, "n_routed_experts");
  }
  rename_field(content, "moe_top_k", "num_experts_per_tok");
  rename_field(content, "share_expert_dims", "share_expert_dim");
  drop_further_layers(content);
  deal_rope(content);
}

/// Returns the query heads of layers with windows in published files.
std::int64_t older_query_heads(ConfigFields& fields, const ModelConfig& config) {
  constexpr const char* field = "attention_other_setting";
  const json* const others = fields.get(field);
  if (others == nullptr) return config.num_attention_heads;
  if (!others->is_object()) fields.fail(field, "an object", files::described(*others));
  ConfigFields nested(*others, fields.file(), field);
  nested.require("attention_type", "sliding_attention");
  nested.require("num_attention_groups", config.num_key_value_heads);
  nested.require("head_dim", config.head_dim);
  nested.require("true_head_dim", config.head_dim);
  const auto heads = nested.find_size("num_attention_heads", max_size);
  return heads.value_or(config.num_attention_heads);
}

void read_step_heads(ConfigFields& fields, ModelConfig& config) {
  const char* field = "num_sliding_attention_heads";
  const std::int64_t older = older_query_heads(fields, config);
  const std::int64_t of_windows = fields.find_size(field, max_size).value_or(older);
  json counts = json::array();
  for (const LayerConfig& layer : config.layers) {
    const std::int64_t heads = layer.window > 0 ? of_windows : config.num_attention_heads;
    counts.push_back(static_cast<std::uint64_t>(heads));
  }
  if (const json* const own = fields.get("per_layer_config")) {
    field = "per_layer_config";
    if (!own->is_object()) fields.fail(field, "an object", files::described(*own));
    std::size_t found = 0;
    for (std::size_t l = 0; l < config.layers.size(); ++l) {
      counts[l] = static_cast<std::uint64_t>(config.num_attention_heads);
      const auto of_layer = own->find(std::to_string(l));
      if (of_layer == own->end()) continue;
      ++found;
      constexpr const char* heads = "num_attention_heads";
      if (!of_layer->is_object() || of_layer->size() != 1 || !of_layer->contains(heads)) {
        fields.fail(field, "objects with num_attention_heads", files::described(*of_layer));
      }
      counts[l] = (*of_layer)[heads];
    }
    if (found != own->size()) {
      fields.fail(field, fmt::format("numbers of layers from 0 to {}", config.layers.size() - 1),
                  files::described(*own));
    }
  }
  set_query_heads(fields, field, counts, config);
}

/// Reads the layers with experts, by default all from the fourth on.
void read_sparse_numbers(ConfigFields& fields, ModelConfig& config) {
  constexpr const char* field = "moe_layers_enum";
  const json* const numbers = fields.get(field);
  for (std::size_t l = 3; l < config.layers.size(); ++l) {
    config.layers[l].has_experts = numbers == nullptr;
  }
  const auto add = [&](const json& number) {
    if (!number.is_number_unsigned()) {
      fields.fail(field, "numbers of layers", files::described(*numbers));
    }
    const auto layer = number.get<std::uint64_t>();
    if (layer < config.layers.size()) config.layers[layer].has_experts = true;
  };
  if (numbers != nullptr && numbers->is_string()) {
    const std::string& text = numbers->get_ref<const std::string&>();
    for (std::size_t begin = 0; begin < text.size();) {
      const std::size_t end = std::min(text.find(',', begin), text.size());
      std::uint64_t number = 0;
      const auto [parsed, error] = std::from_chars(&text[begin], text.data() + end, number);
      const bool is_number = error == std::errc() && parsed == text.data() + end;
      add(is_number ? json(number) : json());
      begin = end + 1;
    }
  } else if (numbers != nullptr) {
    if (!numbers->is_array()) fields.fail(field, "numbers of layers", files::described(*numbers));
    for (const json& number : *numbers) add(number);
  }
  read_sparse_types(fields, config);
}

void read_step_experts(ConfigFields& fields, ModelConfig& config) {
  ExpertsConfig experts = read_experts(fields, "n_routed_experts", 8, config);
  experts.intermediate_size = fields.find_size("moe_intermediate_size", max_size).value_or(1280);
  experts.shared_intermediate_size = fields.find_size("share_expert_dim", max_size).value_or(1280);
  experts.scores = ExpertsConfig::Scores::sigmoid;
  experts.has_correction = experts.normalises = true;
  experts.scale = read_multiplier(fields, "moe_router_scaling_factor");
  config.experts = experts;
  read_sparse_numbers(fields, config);
}

void read_swiglu_limits(ConfigFields& fields, const char* field, double LayerConfig::*limit,
                        ModelConfig& config) {
  const json* const limits = fields.get(field);
  if (limits == nullptr || (limits->is_array() && limits->empty())) return;
  if (!limits->is_array() || limits->size() != config.layers.size()) {
    fields.fail(field, fmt::format("an array of {} numbers", config.layers.size()),
                files::described(*limits));
  }
  for (std::size_t l = 0; l < config.layers.size(); ++l) {
    const json& value = (*limits)[l];
    if (value.is_null() || value == 0) continue;
    if (!value.is_number() || !(value >= 1 / largest_step_limit) ||
        !(value <= largest_step_limit)) {
      fields.fail(
          field,
          fmt::format("numbers from {} to {}, or 0", 1 / largest_step_limit, largest_step_limit),
          files::described(value));
    }
    config.layers[l].*limit = value.get<double>();
  }
}

void read_step3p5(ConfigFields& fields, ModelConfig& config) {
  config.qk_norm = QkNorm::head;
  config.gates_attention = config.gates_heads = true;
  config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
  const auto dim = static_cast<double>(config.head_dim);
  const auto scalar =
      fields.find_number("query_pre_attn_scalar", 1 / largest_step_limit, largest_step_limit);
  if (scalar && *scalar != dim) config.attention_multiplier = 1 / std::sqrt(*scalar);
  read_windows(fields, sliding_window_or(fields, 0), std::vector<bool>(config.layers.size()),
               config);
  read_step_heads(fields, config);
  read_step_experts(fields, config);
  read_swiglu_limits(fields, "swiglu_limits", &LayerConfig::experts_limit, config);
  read_swiglu_limits(fields, "swiglu_limits_shared", &LayerConfig::dense_limit, config);
  for (const char* field : {"gating", "use_qk_norm", "use_moe", "use_head_wise_attn_gate",
                            "use_moe_router_bias", "norm_expert_weight", "zero_centered"}) {
    fields.require(field, true);
  }
  for (const char* field : {"mlp_bias", "sink", "use_bidirectional_attention"}) {
    fields.require(field, false);
  }
  fields.require("moe_router_activation", "sigmoid");
  fields.require("att_impl_type", "GQA");
  fields.require("yarn_only_types", json::array({step_kinds[0]}));
  fields.require("use_rope_layers", json::array());
  fields.require_none("sparse_attention_config");
  for (const char* field :
       {"num_attention_groups", "num_local_experts", "moe_num_experts", "moe_top_k",
        "share_expert_dims", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types",
        "max_seq_len", "moe_every_n_layer", "moe_layer_offset", "need_fp32_gate"}) {
    fields.get(field);
  }
}

}  // namespace

const Family step3p5 = [] {
  Family family;
  family.class_name = "Step3p5ForCausalLM";
  family.model_type = "step3p5";
  family.tested = family_tests;
  family.default_key_value_heads = 8;
  family.default_head_dim = 128;
  family.default_norm_eps = 1e-5;
  family.rope.default_rotary_factor = family.rope.default_window_factor = 1;
  family.rope.default_window_theta = 1e4;
  family.rename = rename_step;
  family.read = read_step3p5;
  family.tensors.norms_add_one = true;
  family.tensors.attention_gate = "self_attn.g_proj";
  family.tensors.router = "moe.gate";
  family.tensors.correction = "moe.router_bias";
  family.tensors.experts_gate = "moe.gate_proj.weight";
  family.tensors.experts_up = "moe.up_proj.weight";
  family.tensors.experts_down = "moe.down_proj.weight";
  family.tensors.rows_first = true;
  family.tensors.shared = "share_expert";
  return family;
}();

}  // namespace kvzap::model
