#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "model/families/family.hpp"

namespace kvzap::model {

using files::described;
using nlohmann::json;

namespace {

constexpr std::int64_t max_experts = 65536;
// Far above any published model. A hostile file must not make the reader plan for hours.
constexpr std::int64_t max_experts_of_all_layers = std::int64_t{1} << 20;
constexpr double largest_multiplier = 1e6;

}  // namespace

double read_soft_cap(ConfigFields& fields, const char* field, double absent) {
  const auto cap = fields.find_number(field, 1 / largest_multiplier, largest_multiplier);
  return fields.has_key(field) ? cap.value_or(0) : absent;
}

void ignore_bias(ConfigFields& fields, const char* field, ModelConfig& config) {
  if (!fields.flag(field, false)) return;
  config.warnings.push_back(fmt::format("{}: {}: {} has no such field, true is ignored",
                                        fields.file(), field, config.architecture));
}

std::optional<std::vector<bool>> read_layer_types(ConfigFields& fields, std::string_view reduced,
                                                  const ModelConfig& config) {
  const json* const types = fields.get("layer_types");
  if (types == nullptr) return std::nullopt;
  if (!types->is_array() || types->size() != static_cast<std::size_t>(config.num_hidden_layers)) {
    fields.fail("layer_types", fmt::format("an array of {} names", config.num_hidden_layers),
                described(*types));
  }
  std::vector<bool> is_reduced;
  for (const json& type : *types) {
    is_reduced.push_back(type != "full_attention");
    if (!is_reduced.back() || (!reduced.empty() && type == std::string(reduced))) continue;
    fields.fail("layer_types",
                reduced.empty() ? "only \"full_attention\""
                                : fmt::format("\"full_attention\" or \"{}\"", reduced),
                described(type));
  }
  return is_reduced;
}

void read_windows(ConfigFields& fields, std::int64_t window, const std::vector<bool>& absent,
                  ModelConfig& config) {
  const auto stated = read_layer_types(fields, window > 0 ? "sliding_attention" : "", config);
  const std::vector<bool>& slides = stated ? *stated : absent;
  for (std::size_t l = 0; l < config.layers.size(); ++l) {
    if (slides[l]) config.layers[l].window = window;
  }
}

void read_pattern_of_windows(ConfigFields& fields, std::int64_t window, std::int64_t pattern,
                             ModelConfig& config) {
  std::vector<bool> slides;
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
    slides.push_back((l + 1) % pattern != 0);
  }
  read_windows(fields, window, slides, config);
}

void set_window(ConfigFields& fields, std::int64_t window, ModelConfig& config) {
  // transformers' class ignores the field.
  read_layer_types(fields, window > 0 ? "sliding_attention" : "", config);
  for (LayerConfig& layer : config.layers) layer.window = window;
}

std::int64_t sliding_window_or(ConfigFields& fields, std::int64_t absent, const char* field) {
  const auto window = fields.find_size(field, max_size);
  if (window && *window == 1) {
    fields.fail(field, "at least 2 tokens: the newest and one before it", "1");
  }
  return fields.has_key(field) ? window.value_or(0) : absent;
}

void set_query_heads(ConfigFields& fields, const char* field, const json& counts,
                     ModelConfig& config) {
  constexpr std::int64_t most = 65536;
  const std::int64_t kv_heads = config.num_key_value_heads;
  std::optional<std::int64_t> of_full;
  for (std::size_t l = 0; l < config.layers.size(); ++l) {
    const json& count = counts[l];
    const bool is_count = count.is_number_unsigned() && count > 0 && count <= most;
    if (!is_count || count.get<std::int64_t>() % kv_heads != 0) {
      fields.fail(field,
                  fmt::format("multiples of num_key_value_heads ({}) up to {}", kv_heads, most),
                  described(count));
    }
    const auto heads = count.get<std::int64_t>();
    if (config.layers[l].window > 0) {
      config.layers[l].query_heads = heads;
    } else if (of_full.value_or(heads) != heads) {
      fields.fail(field, fmt::format("the same number in all full layers ({})", *of_full),
                  fmt::format("{}", heads));
    } else {
      of_full = heads;
    }
  }
  config.num_attention_heads = of_full.value_or(config.num_attention_heads);
  for (LayerConfig& layer : config.layers) {
    // Layers with other heads than the model's stay windows, as policies see heads of one number.
    if (layer.query_heads == config.num_attention_heads) layer.query_heads = 0;
    layer.keeps_window = layer.query_heads > 0;
  }
}

ExpertsConfig read_experts(ConfigFields& fields, const char* count_field,
                           std::int64_t default_per_token, const ModelConfig& config,
                           const char* per_token_field, std::int64_t identities) {
  ExpertsConfig experts;
  experts.count = fields.size(count_field, max_experts);
  if (experts.count > max_experts_of_all_layers / config.num_hidden_layers) {
    fields.fail(count_field,
                fmt::format("at most {} experts in all layers", max_experts_of_all_layers),
                fmt::format("{} in each of {}", experts.count, config.num_hidden_layers));
  }
  experts.identities = identities;
  experts.per_token =
      default_per_token == 0
          ? fields.size(per_token_field, max_experts)
          : fields.find_size(per_token_field, max_experts).value_or(default_per_token);
  if (experts.per_token > experts.routes()) {
    fields.fail(per_token_field, fmt::format("at most {} ({})", count_field, experts.routes()),
                fmt::format("{}", experts.per_token));
  }
  experts.intermediate_size = config.intermediate_size;
  return experts;
}

void read_experts_everywhere(ConfigFields& fields, std::int64_t default_per_token,
                             ModelConfig& config) {
  config.experts = read_experts(fields, "num_local_experts", default_per_token, config);
  config.experts->normalises = true;
  for (LayerConfig& layer : config.layers) layer.has_experts = true;
}

void read_shared_width(ConfigFields& fields, const char* field, std::int64_t absent,
                       ExpertsConfig& experts) {
  const std::int64_t shared = absent == 0 ? fields.size(field, experts.count)
                                          : fields.find_size(field, experts.count).value_or(absent);
  if (__builtin_mul_overflow(shared, experts.intermediate_size,
                             &experts.shared_intermediate_size) ||
      experts.shared_intermediate_size > max_size) {
    fields.fail(field, fmt::format("a width of at most {}", max_size),
                fmt::format("{} x {}", shared, experts.intermediate_size));
  }
}

namespace {

void read_expert_groups(ConfigFields& fields, const GroupedExperts& rules, ExpertsConfig& experts) {
  experts.normalises = fields.flag("norm_topk_prob", rules.normalises);
  const auto or_absent = [&](const char* field, std::int64_t most, std::int64_t absent) {
    return fields.find_size(field, most).value_or(fields.has_key(field) ? 1 : absent);
  };
  experts.groups = or_absent("n_group", experts.count, rules.default_groups);
  experts.groups_per_token =
      or_absent("topk_group", experts.groups, rules.default_groups_per_token);
  if (experts.count % experts.groups != 0 || experts.count / experts.groups < 2) {
    fields.fail("n_group", fmt::format("groups of 2 or more of the {} experts", experts.count),
                fmt::format("{}", experts.groups));
  }
}

}  // namespace

void read_grouped_experts(ConfigFields& fields, const GroupedExperts& rules, ModelConfig& config) {
  constexpr const char* width_field = "moe_intermediate_size";
  ExpertsConfig experts = read_experts(fields, rules.count_field, rules.default_per_token, config);
  experts.intermediate_size =
      rules.default_width == 0
          ? fields.size(width_field, max_size)
          : fields.find_size(width_field, max_size).value_or(rules.default_width);
  experts.scores = ExpertsConfig::Scores::sigmoid;
  experts.has_correction = true;
  experts.normalises = true;
  experts.scale = read_multiplier(fields, rules.scale_field, rules.default_scale);
  read_shared_width(fields, rules.shared_field, rules.default_shared, experts);
  config.experts = experts;
  if (rules.has_groups) read_expert_groups(fields, rules, *config.experts);
  for (const char* field : {"n_group", "topk_group", "norm_topk_prob"}) fields.get(field);
}

void read_leading_dense(ConfigFields& fields, std::int64_t absent, ModelConfig& config,
                        const char* field) {
  const double dense = fields.find_number(field, 0, max_size).value_or(static_cast<double>(absent));
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
    config.layers[static_cast<std::size_t>(l)].has_experts = static_cast<double>(l) >= dense;
  }
}

void read_sparse_types(ConfigFields& fields, ModelConfig& config) {
  constexpr const char* field = "mlp_layer_types";
  const json* const types = fields.get(field);
  if (types == nullptr) return;
  if (!types->is_array() || types->size() != config.layers.size()) {
    fields.fail(field, fmt::format("an array of {} names", config.layers.size()),
                described(*types));
  }
  for (std::size_t l = 0; l < config.layers.size(); ++l) {
    const json& type = (*types)[l];
    if (type != "sparse" && type != "dense") {
      fields.fail(field, "\"sparse\" or \"dense\"", described(type));
    }
    config.layers[l].has_experts = type == "sparse";
  }
}

void read_sparse_layers(ConfigFields& fields, ModelConfig& config,
                        const std::vector<std::int64_t>& absent) {
  const auto count = config.num_hidden_layers;
  const std::int64_t step = fields.find_size("decoder_sparse_step", max_size).value_or(1);
  std::vector<bool> is_dense(static_cast<std::size_t>(count), false);
  const auto set_dense = [&](std::int64_t layer) {
    if (layer >= 0 && layer < count) is_dense[static_cast<std::size_t>(layer)] = true;
  };
  if (const json* const layers = fields.get("mlp_only_layers")) {
    if (!layers->is_array()) fields.fail("mlp_only_layers", "an array", described(*layers));
    for (const json& layer : *layers) {
      if (!layer.is_number_integer()) {
        fields.fail("mlp_only_layers", "numbers of layers", described(layer));
      }
      set_dense(layer.get<std::int64_t>());
    }
  } else {
    for (const std::int64_t layer : absent) set_dense(layer);
  }
  for (std::int64_t l = 0; l < count; ++l) {
    const auto at = static_cast<std::size_t>(l);
    config.layers[at].has_experts = (l + 1) % step == 0 && !is_dense[at];
  }
}

void read_rope_layers(ConfigFields& fields, bool empty_is_absent, ModelConfig& config) {
  const std::int64_t interval = fields.find_size("no_rope_layer_interval", max_size).value_or(4);
  const json* flags = fields.get("no_rope_layers");  // 1: with RoPE
  if (empty_is_absent && flags != nullptr && flags->is_array() && flags->empty()) flags = nullptr;
  const auto count = static_cast<std::size_t>(config.num_hidden_layers);
  if (flags != nullptr && (!flags->is_array() || flags->size() != count)) {
    fields.fail("no_rope_layers", fmt::format("an array of {} numbers", count), described(*flags));
  }
  for (std::size_t l = 0; l < count; ++l) {
    LayerConfig& layer = config.layers[l];
    layer.has_rope = (static_cast<std::int64_t>(l) + 1) % interval != 0;
    if (flags != nullptr) {
      const json& flag = (*flags)[l];
      if (flag != 0 && flag != 1) fields.fail("no_rope_layers", "0 or 1", described(flag));
      layer.has_rope = flag == 1;
    }
  }
}

Activation read_activation(ConfigFields& fields, const char* field, Activation absent) {
  constexpr std::pair<std::string_view, Activation> known[] = {
      {"silu", Activation::silu},          {"swish", Activation::silu},
      {"gelu", Activation::gelu},          {"gelu_pytorch_tanh", Activation::gelu_tanh},
      {"gelu_new", Activation::gelu_tanh}, {"gelu_fast", Activation::gelu_tanh},
      {"relu2", Activation::relu2},        {"relu", Activation::relu}};
  const auto name = fields.find_text(field);
  if (!name) return absent;
  std::vector<std::string_view> names;
  for (const auto& [of_file, activation] : known) {
    if (of_file == *name) return activation;
    names.push_back(of_file);
  }
  fields.fail(field, files::alternatives(names), files::in_quotes(*name));
}

void rename_field(ConfigContent& content, const char* own, const char* name) {
  const auto found = content.find(own);
  if (found != content.end() && !found->is_null()) {
    content[name] = json(*found);
  } else if (content.contains(name)) {
    return;
  }
  content.names_in_file[name] = own;
}

void rename_inner_field(ConfigContent& content, const char* object, const char* own,
                        const char* name) {
  const auto outer = content.find(object);
  if (outer == content.end() || !outer->is_object()) return;
  const auto inner = outer->find(own);
  if (inner == outer->end() || inner->is_null()) return;
  content[name] = json(*inner);
  content.names_in_file[name] = fmt::format("{}.{}", object, own);
}

void require_own_kv_heads(ConfigFields& fields, const ModelConfig& config) {
  if (config.num_key_value_heads == config.num_attention_heads) return;
  fields.require("num_key_value_heads", config.num_attention_heads);
}

void require_heads_of_hidden_size(ConfigFields& fields, const ModelConfig& config) {
  if (config.head_dim * config.num_attention_heads == config.hidden_size) return;
  fields.require("head_dim", config.hidden_size / config.num_attention_heads);
}

void default_width(json& content) {
  constexpr const char* field = "intermediate_size";
  const auto hidden = content.find("hidden_size");
  if ((content.contains(field) && !content[field].is_null()) || hidden == content.end()) return;
  if (!hidden->is_number_unsigned() || *hidden >= max_size) return;
  content[field] = 4 * hidden->get<std::int64_t>();
}

void set_layer_norms(ModelConfig& config) {
  config.norm_type = NormType::layer;
  config.norm_bias = true;
}

double read_multiplier(ConfigFields& fields, const char* field, double absent) {
  return fields.find_number(field, 1 / largest_multiplier, largest_multiplier).value_or(absent);
}

}  // namespace kvzap::model
