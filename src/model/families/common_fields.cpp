#include <fmt/format.h>

#include <algorithm>

#include "model/families/family.hpp"

namespace kvzap::model {

using base::described;
using nlohmann::json;

namespace {

constexpr std::int64_t max_experts = 65536;
// Far above any published model. A hostile file must not make the reader plan for hours.
constexpr std::int64_t max_experts_of_all_layers = std::int64_t{1} << 20;
constexpr double largest_multiplier = 1e6;

}  // namespace

void ignore_bias(ConfigFields& fields, const char* field, ModelConfig& config) {
  if (!fields.flag(field, false)) return;
  config.warnings.push_back(fmt::format("{}: {}: {} has no such field, true is ignored",
                                        fields.file(), field, config.architecture));
}

bool read_layer_types(ConfigFields& fields, bool has_window, const ModelConfig& config) {
  const json* const types = fields.get("layer_types");
  if (types == nullptr) return false;
  if (!types->is_array() || types->size() != static_cast<std::size_t>(config.num_hidden_layers)) {
    fields.fail("layer_types", fmt::format("an array of {} names", config.num_hidden_layers),
                described(*types));
  }
  bool slides = false;
  for (const json& type : *types) {
    if (type == "full_attention") continue;
    if (!has_window || type != "sliding_attention") {
      fields.fail("layer_types", "only \"full_attention\"", described(type));
    }
    slides = true;
  }
  return slides;
}

std::int64_t sliding_window_or(ConfigFields& fields, std::int64_t absent) {
  const auto window = fields.find_size("sliding_window", max_size);
  return fields.has_key("sliding_window") ? window.value_or(0) : absent;
}

ExpertsConfig read_experts(ConfigFields& fields, const char* count_field,
                           std::int64_t default_per_token, const ModelConfig& config) {
  ExpertsConfig experts;
  experts.count = fields.size(count_field, max_experts);
  if (experts.count > max_experts_of_all_layers / config.num_hidden_layers) {
    fields.fail(count_field,
                fmt::format("at most {} experts in all layers", max_experts_of_all_layers),
                fmt::format("{} in each of {}", experts.count, config.num_hidden_layers));
  }
  experts.per_token =
      fields.find_size("num_experts_per_tok", max_experts).value_or(default_per_token);
  if (experts.per_token > experts.count) {
    fields.fail("num_experts_per_tok", fmt::format("at most {} ({})", count_field, experts.count),
                fmt::format("{}", experts.per_token));
  }
  experts.intermediate_size = config.intermediate_size;
  return experts;
}

void read_experts_everywhere(ConfigFields& fields, std::int64_t default_per_token,
                             ModelConfig& config) {
  config.experts = read_experts(fields, "num_local_experts", default_per_token, config);
  config.experts->normalises = true;
  config.layers.assign(static_cast<std::size_t>(config.num_hidden_layers), {true, true});
}

void read_sparse_layers(ConfigFields& fields, ModelConfig& config) {
  const std::int64_t step = fields.find_size("decoder_sparse_step", max_size).value_or(1);
  std::vector<std::int64_t> dense;
  if (const json* const layers = fields.get("mlp_only_layers")) {
    if (!layers->is_array()) fields.fail("mlp_only_layers", "an array", described(*layers));
    for (const json& layer : *layers) {
      if (!layer.is_number_integer()) {
        fields.fail("mlp_only_layers", "numbers of layers", described(layer));
      }
      dense.push_back(layer.get<std::int64_t>());
    }
  }
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
    LayerConfig layer;
    layer.has_experts =
        (l + 1) % step == 0 && std::find(dense.begin(), dense.end(), l) == dense.end();
    config.layers.push_back(layer);
  }
}

double read_multiplier(ConfigFields& fields, const char* field) {
  return fields.find_number(field, 1 / largest_multiplier, largest_multiplier).value_or(1);
}

}  // namespace kvzap::model
