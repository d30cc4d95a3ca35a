// Gemma 3n and 4: a second embedding with inputs for each layer, layers that read the keys and
// values of earlier ones, values with norms. Full layers of Gemma 4 have heads of their own size;
// Gemma 3n has several residual streams.
#include <fmt/format.h>

#include <cmath>

#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

constexpr std::int64_t default_inputs_size = 256;
constexpr std::int64_t default_inputs_vocabulary = 262144;

/// Returns a size whose absence is `absent`, and 0 for null or 0.
std::int64_t size_or_none(ConfigFields& fields, const char* field, std::int64_t absent) {
  if (!fields.has_key(field)) return absent;
  const nlohmann::json* const value = fields.get(field);
  return value == nullptr || *value == 0 ? 0 : fields.size(field, max_size);
}

/// What all models have.
void read_of_both(ConfigFields& fields, ModelConfig& config) {
  fields.get("hidden_act");  // transformers reads hidden_activation
  fields.require("hidden_activation", "gelu_pytorch_tanh");
  config.activation = Activation::gelu_tanh;
  config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
  config.embedding_multiplier = std::sqrt(static_cast<double>(config.hidden_size));
  config.rounds_embedding_multiplier = true;
  config.attention_multiplier = 1;
  config.qk_norm = QkNorm::head;
  config.norms_values = true;
}

/// Windows of the layers that slide. They stay windows in short contexts, as later layers read the
/// rows of one layer of each kind.
void read_layer_windows(ConfigFields& fields, std::int64_t pattern, ModelConfig& config) {
  read_pattern_of_windows(fields, sliding_window_or(fields, 512), pattern, config);
  for (LayerConfig& layer : config.layers) layer.keeps_window = layer.window > 0;
}

/// The last layers read the rows of the last layer of their kind before them.
void read_shared_layers(ConfigFields& fields, std::int64_t absent, ModelConfig& config) {
  constexpr const char* field = "num_kv_shared_layers";
  const std::int64_t shared = size_or_none(fields, field, absent);
  const auto count = static_cast<std::int64_t>(config.layers.size());
  std::int64_t last_full = -1, last_sliding = -1;
  for (std::int64_t l = 0; l < count; ++l) {
    LayerConfig& layer = config.layers[static_cast<std::size_t>(l)];
    std::int64_t& last = layer.window > 0 ? last_sliding : last_full;
    if (l < count - shared) {
      last = l;
      continue;
    }
    layer.rows_of = last;
    if (last >= 0) continue;
    fields.fail(
        field, fmt::format("a number that leaves a layer of each of the layer_types, of {}", count),
        fmt::format("{}", shared));
  }
}

void read_layer_inputs(ConfigFields& fields, ModelConfig& config) {
  LayerInputsConfig inputs;
  inputs.size = size_or_none(fields, "hidden_size_per_layer_input", default_inputs_size);
  inputs.vocab_size =
      fields.find_size("vocab_size_per_layer_input", max_size).value_or(default_inputs_vocabulary);
  if (inputs.size == 0) return;
  if (inputs.size > max_size / static_cast<std::int64_t>(config.layers.size())) {
    fields.fail("hidden_size_per_layer_input",
                fmt::format("at most {} values for all layers", max_size),
                fmt::format("{} for each of {}", inputs.size, config.layers.size()));
  }
  config.layer_inputs = inputs;
}

/// Sizes of the heads of full layers, which are the model's; `fields` has those of layers with
/// windows as the model's. transformers writes per_layer_config instead of the fields of published
/// files.
void read_head_sizes(ConfigFields& fields, bool keys_are_values, ModelConfig& config) {
  constexpr const char* written = "per_layer_config";
  constexpr std::int64_t most = 65536;
  constexpr std::int64_t default_global_dim = 512;
  std::int64_t dim = fields.find_size("global_head_dim", most).value_or(default_global_dim);
  auto kv_heads = fields.find_size("num_global_key_value_heads", most);
  if (!keys_are_values) kv_heads.reset();  // as in transformers
  if (const nlohmann::json* const layers = fields.get(written)) {
    if (!layers->is_object()) fields.fail(written, "an object", files::described(*layers));
    dim = config.head_dim;
    kv_heads.reset();
    std::string first;
    for (std::size_t l = 0; l < config.layers.size(); ++l) {
      const std::string name = fmt::format("{}", l);
      const auto found = layers->find(name);
      const bool is_full = config.layers[l].window == 0;
      if (found == layers->end() && !is_full) continue;
      const nlohmann::json own = found == layers->end() ? nlohmann::json::object() : *found;
      const std::string where = fmt::format("{}.{}", written, name);
      if (!is_full || !own.is_object() || (!first.empty() && own.dump() != first)) {
        fields.fail(where, "the same object for all full layers, and none for others",
                    files::described(own));
      }
      first = own.dump();
      ConfigFields nested(own, fields.file(), where);
      dim = nested.find_size("head_dim", most).value_or(config.head_dim);
      kv_heads = nested.find_size("num_key_value_heads", most);
      nested.warn_unknown({}, config.warnings);
    }
  }
  const std::int64_t full_heads = kv_heads.value_or(config.num_key_value_heads);
  if (dim % 2 != 0) fields.fail("global_head_dim", "an even number", fmt::format("{}", dim));
  if (config.num_key_value_heads % full_heads != 0) {
    fields.fail("num_global_key_value_heads",
                fmt::format("a divisor of num_key_value_heads ({})", config.num_key_value_heads),
                fmt::format("{}", full_heads));
  }
  for (LayerConfig& layer : config.layers) {
    layer.values_are_keys = keys_are_values && layer.window == 0;
    if (layer.window == 0) continue;
    if (config.head_dim != dim) layer.head_dim = config.head_dim;
    layer.kv_heads_factor = config.num_key_value_heads / full_heads;
  }
  config.head_dim = dim;
  config.num_key_value_heads = full_heads;
}

void read_gemma4_experts(ConfigFields& fields, ModelConfig& config) {
  if (!fields.flag("enable_moe_block", false)) {
    for (const char* of_experts : {"num_experts", "top_k_experts", "moe_intermediate_size"}) {
      fields.get(of_experts);
    }
    return;
  }
  ExpertsConfig experts = read_experts(fields, "num_experts", 0, config, "top_k_experts");
  experts.intermediate_size = fields.size("moe_intermediate_size", max_size);
  experts.normalises = experts.beside_dense = true;
  config.experts = experts;
  for (LayerConfig& layer : config.layers) layer.has_experts = true;
}

void read_gemma4(ConfigFields& fields, ModelConfig& config) {
  read_of_both(fields, config);
  config.scales_layers = true;
  config.logits_soft_cap = read_soft_cap(fields, "final_logit_softcapping", 0);
  // Tokens of images see one another; those of texts do not.
  if (fields.find_text("use_bidirectional_attention") != "vision") {
    fields.require_none("use_bidirectional_attention");
  }
  read_layer_windows(fields, 6, config);
  LayerConfig& last = config.layers.back();
  if (last.window > 0) {
    config.warnings.push_back(fmt::format(
        "{}: layer_types: the last layer has full attention, as in transformers", fields.file()));
    last.window = 0;
    last.keeps_window = false;
  }
  read_head_sizes(fields, fields.flag("attention_k_eq_v", false), config);
  read_shared_layers(fields, 0, config);
  if (fields.flag("use_double_wide_mlp", false)) {
    if (config.intermediate_size > max_size / 2) {
      fields.fail("intermediate_size", fmt::format("at most {}", max_size / 2),
                  fmt::format("{}", config.intermediate_size));
    }
    for (LayerConfig& layer : config.layers) {
      if (layer.rows_of >= 0) layer.intermediate_size = 2 * config.intermediate_size;
    }
  }
  read_layer_inputs(fields, config);
  read_gemma4_experts(fields, config);
}

Family gemma4_family() {
  Family family;
  family.tested = family_tests;
  family.default_key_value_heads = 4;
  family.default_head_dim = 256;
  family.ties_by_default = true;
  family.rope.default_theta = 1e6;
  family.rope.default_window_theta = 1e4;
  family.rope.default_turning_part = 0.25;
  family.read = read_gemma4;
  family.tensors.attention_out = "post_attention_layernorm";
  family.tensors.feed_forward_in = "pre_feedforward_layernorm";
  family.tensors.feed_forward_out = "post_feedforward_layernorm";
  family.tensors.router = "router.proj";
  family.tensors.expert_gate = "experts.{}.gate_proj";  // of tensors of all experts
  family.tensors.expert_up = "experts.{}.up_proj";
  family.tensors.expert_down = "experts.{}.down_proj";
  return family;
}

/// Returns x such that a standard normal number is below it with this probability, in (0, 1).
double normal_quantile(double probability) {
  double low = -40, high = 40;
  constexpr int halvings = 80;
  for (int i = 0; i < halvings; ++i) {
    const double middle = (low + high) / 2;
    (std::erfc(-middle / std::sqrt(2.0)) / 2 < probability ? low : high) = middle;
  }
  return low;
}

/// The part of each layer's gates that are cut off.
void read_sparsity(ConfigFields& fields, ModelConfig& config) {
  constexpr const char* field = "activation_sparsity_pattern";
  constexpr std::size_t sparse_by_default = 10;
  constexpr double default_sparsity = 0.95;
  const nlohmann::json* const listed = fields.get(field);
  const std::size_t count = config.layers.size();
  if (listed != nullptr && (!listed->is_array() || listed->size() != count)) {
    fields.fail(field, fmt::format("an array of {} numbers", count), files::described(*listed));
  }
  for (std::size_t l = 0; l < count; ++l) {
    double part = count > sparse_by_default && l < sparse_by_default ? default_sparsity : 0;
    if (listed != nullptr) {
      const nlohmann::json& own = (*listed)[l];
      part = own.is_number() ? own.get<double>() : -1;
      if (!(part >= 0 && part < 1)) {
        fields.fail(field, "numbers from 0 to below 1", files::described(own));
      }
    }
    if (part > 0) config.layers[l].gate_cutoff = normal_quantile(static_cast<float>(part));
  }
}

constexpr const char* widths_field = "intermediate_sizes";

/// The file may have a width for each layer.
void rename_widths(ConfigContent& content) {
  const auto found = content.find("intermediate_size");
  if (found == content.end() || !found->is_array() || found->empty()) return;
  content[widths_field] = *found;
  content["intermediate_size"] = content[widths_field].front();
}

void read_widths(ConfigFields& fields, ModelConfig& config) {
  const nlohmann::json* const widths = fields.get(widths_field);
  if (widths == nullptr) return;
  for (std::size_t l = 0; l < config.layers.size(); ++l) {
    const bool has_one = widths->is_array() && widths->size() == config.layers.size();
    if (!has_one || !(*widths)[l].is_number_unsigned() || (*widths)[l] == 0 ||
        (*widths)[l] > max_size) {
      fields.fail("intermediate_size",
                  fmt::format("one width from 1 to {}, or one for each of {} layers", max_size,
                              config.layers.size()),
                  files::described(*widths));
    }
    config.layers[l].intermediate_size = (*widths)[l].get<std::int64_t>();
  }
}

void read_alt_up(ConfigFields& fields, ModelConfig& config) {
  AltUpConfig alt_up;
  alt_up.streams = fields.find_size("altup_num_inputs", AltUpConfig::most_streams).value_or(4);
  const double last = static_cast<double>(alt_up.streams - 1);
  const double active = fields.find_number("altup_active_idx", 0, last).value_or(0);
  alt_up.active = static_cast<std::int64_t>(active);
  if (static_cast<double>(alt_up.active) != active) {
    fields.fail("altup_active_idx", "a whole number", fmt::format("{}", active));
  }
  alt_up.scales_output = fields.flag("altup_correct_scale", true);
  alt_up.laurel_rank = fields.find_size("laurel_rank", max_size).value_or(64);
  fields.get("altup_coef_clip");  // of training
  config.alt_up = alt_up;
}

}  // namespace

const Family gemma4 = [] {
  Family family = gemma4_family();
  family.class_name = "Gemma4ForCausalLM";
  family.model_type = "gemma4_text";
  family.text_defaults =
      R"({"vocab_size":262144,"hidden_size":2304,"intermediate_size":9216,"num_hidden_layers":30,)"
      R"("num_attention_heads":8,"max_position_embeddings":131072})";
  return family;
}();

const Family gemma4_unified = [] {
  Family family = gemma4_family();
  family.class_name = "Gemma4UnifiedForCausalLM";
  family.model_type = "gemma4_unified_text";
  family.text_defaults =
      R"({"vocab_size":262144,"hidden_size":2304,"intermediate_size":9216,"num_hidden_layers":30,)"
      R"("num_attention_heads":8,"max_position_embeddings":262144})";
  family.rename = [](ConfigContent& content) {
    // What the class lacks, or has another default of.
    content["hidden_size_per_layer_input"] = 0;
    if (!content.contains("sliding_window")) content["sliding_window"] = 1024;
  };
  return family;
}();

const Family gemma3n = [] {
  Family family = gemma4_family();
  family.class_name = "Gemma3nForCausalLM";
  family.model_type = "gemma3n_text";
  family.text_defaults =
      R"({"vocab_size":262400,"hidden_size":2048,"intermediate_size":16384,"num_hidden_layers":35,)"
      R"("num_attention_heads":8,"max_position_embeddings":32768})";
  family.default_key_value_heads = 2;
  family.rope.default_turning_part = 0;
  family.rename = rename_widths;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_of_both(fields, config);
    config.logits_soft_cap = read_soft_cap(fields, "final_logit_softcapping", 30);
    read_layer_windows(fields, 5, config);
    read_shared_layers(fields, 15, config);
    read_layer_inputs(fields, config);
    read_widths(fields, config);
    read_sparsity(fields, config);
    read_alt_up(fields, config);
  };
  return family;
}();

}  // namespace kvzap::model
