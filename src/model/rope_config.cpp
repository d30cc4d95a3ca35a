#include "model/rope_config.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "model/rope.hpp"
#include "model/supported_names.hpp"

namespace kvzap::model {

using nlohmann::json;

namespace {

constexpr double min_attention = 1e-3;
constexpr double max_attention = 1e3;
constexpr double min_beta = 1e-6;
constexpr double max_beta = 1e9;
// The range in which single precision computes, with room for a product.
constexpr double smallest_float = 1e-30;
constexpr double largest_float = 1e30;

/// The RoPE settings of one of the two dialects.
struct Rope {
  std::optional<double> theta;
  std::optional<RopeScaling> scaling;
  std::optional<QueryScaling> query_scaling;
  std::vector<std::int64_t> image_sections;
  std::optional<double> alpha;
  double turning_part = 1;
};

constexpr const char* rotary_factor_field = "partial_rotary_factor";

/// Sets the number of dimensions that RoPE rotates, as transformers computes it.
void read_rotary_dim(ConfigFields& fields, const RopeRules& rules, ModelConfig& config) {
  config.rope_is_interleaved = rules.is_interleaved;
  if (rules.rotary_dim_field != nullptr) {
    fields.get(rotary_factor_field);
    config.rotary_dim = fields.find_size(rules.rotary_dim_field, config.head_dim)
                            .value_or(rules.default_rotary_dim);
    if (config.rotary_dim % 2 != 0) {
      fields.fail(rules.rotary_dim_field, "an even number", fmt::format("{}", config.rotary_dim));
    }
    return;
  }
  if (rules.default_rotary_factor == 0) {
    fields.require(rotary_factor_field, 1);
    return;
  }
  auto factor = fields.find_number(rotary_factor_field, 0, 1);
  if (rules.has_older_names && !factor) factor = fields.find_number("rotary_pct", 0, 1);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const json* const object = fields.get(key);
    if (object == nullptr || !object->is_object()) continue;
    const auto of_full = object->find("full_attention");
    const bool has_kinds = rules.default_window_theta > 0 && of_full != object->end();
    if (has_kinds && !of_full->is_object()) continue;  // parse_rope refuses it
    ConfigFields nested(has_kinds ? *of_full : *object, fields.file(), key);
    const auto own = nested.find_number(rotary_factor_field, 0, 1);
    if (own && factor && *own != *factor) {
      nested.fail(rotary_factor_field, fmt::format("{} as elsewhere in the file", *factor),
                  fmt::format("{}", *own));
    }
    if (own) factor = own;
  }
  const auto dims = fields.find_size("rotary_dim", config.head_dim);
  const double part = factor.value_or(rules.default_rotary_factor);
  config.rotary_dim = dims && !factor
                          ? *dims
                          : static_cast<std::int64_t>(static_cast<double>(config.head_dim) * part);
  if (config.rotary_dim < 2 || config.rotary_dim % 2 != 0) {
    fields.fail(rotary_factor_field, "an even number of rotated dimensions above 0",
                fmt::format("{} of {}", config.rotary_dim, config.head_dim));
  }
}

/// Returns a base whose powers are floats.
std::optional<double> find_theta(ConfigFields& fields, const char* field = "rope_theta") {
  const auto theta = fields.find_positive(field);
  if (theta) fields.find_number(field, smallest_float, largest_float);
  return theta;
}

/// Returns the number of tokens that a model was trained on before its context was extended. In
/// transformers a field beside the RoPE parameters, as in Phi-3, overrides one among them.
std::int64_t original_length(ConfigFields& fields, std::optional<std::int64_t> beside,
                             const ModelConfig& config, std::vector<std::string>& warnings) {
  const auto own = fields.find_size("original_max_position_embeddings", max_size);
  if (beside && own && *beside != *own) {
    warnings.push_back(
        fmt::format("{}: original_max_position_embeddings = {} counts, not the {} among the RoPE "
                    "parameters, as in transformers",
                    fields.file(), *beside, *own));
  }
  const std::int64_t length = beside ? *beside : own.value_or(config.max_position_embeddings);
  if (length < 2) {
    fields.fail("original_max_position_embeddings", "a whole number above 1",
                fmt::format("{}", length));
  }
  return length;
}

/// Returns the factor; if null, the ratio of max_position_embeddings to the original length.
double extension(ConfigFields& fields, bool may_be_absent, std::int64_t original,
                 const ModelConfig& config) {
  const auto factor = fields.find_number("factor", 1, max_rope_factor);
  if (factor) return *factor;
  if (!may_be_absent && !fields.has_key("factor")) {
    fields.fail("factor", fmt::format("a number from 1 to {}", max_rope_factor), "none");
  }
  if (original > config.max_position_embeddings) {
    fields.fail("original_max_position_embeddings",
                fmt::format("at most max_position_embeddings ({}), as there is no factor",
                            config.max_position_embeddings),
                fmt::format("{}", original));
  }
  return static_cast<double>(config.max_position_embeddings) / static_cast<double>(original);
}

std::vector<double> factors_of_longrope(ConfigFields& fields, const std::string& field,
                                        std::int64_t pairs) {
  const auto expected =
      fmt::format("an array of {} numbers above 0 (half of the rotated dimensions), up to {}",
                  pairs, max_rope_factor);
  const json* const value = fields.get(field);
  if (value == nullptr) fields.fail(field, expected, "none");
  if (!value->is_array()) fields.fail(field, expected, files::described(*value));
  if (value->size() != static_cast<std::size_t>(pairs)) {
    fields.fail(field, expected, fmt::format("{} values", value->size()));
  }
  std::vector<double> factors;
  for (const json& factor : *value) {
    // Smaller values would give absurd frequencies, or frequencies that are no floats.
    if (!factor.is_number() || !(factor.get<double>() >= 1 / max_rope_factor) ||
        !(factor.get<double>() <= max_rope_factor)) {
      fields.fail(field, expected, files::described(factor));
    }
    factors.push_back(factor.get<double>());
  }
  return factors;
}

void read_llama3(ConfigFields& fields, RopeScaling& scaling) {
  const auto positive = [&](const char* field) {
    fields.positive(field);
    return fields.number(field, 1 / max_rope_factor, max_rope_factor);
  };
  scaling.factor = positive("factor");
  scaling.low_freq_factor = positive("low_freq_factor");
  scaling.high_freq_factor = positive("high_freq_factor");
  // Llama 4 has equal factors: no wavelength is interpolated.
  if (!(scaling.high_freq_factor >= scaling.low_freq_factor)) {
    fields.fail("high_freq_factor",
                fmt::format("at least low_freq_factor ({})", scaling.low_freq_factor),
                fmt::format("{}", scaling.high_freq_factor));
  }
}

void read_yarn(ConfigFields& fields, RopeScaling& scaling) {
  const auto attention = fields.find_number("attention_factor", min_attention, max_attention);
  // 0 means absent, as in transformers.
  const double mscale = fields.find_number("mscale", 0, max_attention).value_or(0);
  const double mscale_all_dim = fields.find_number("mscale_all_dim", 0, max_attention).value_or(0);
  scaling.attention_factor =
      attention.value_or(yarn_attention_factor(scaling.factor, mscale, mscale_all_dim));
  scaling.beta_fast = fields.find_number("beta_fast", min_beta, max_beta).value_or(32);
  scaling.beta_slow = fields.find_number("beta_slow", min_beta, max_beta).value_or(1);
  if (scaling.beta_fast < scaling.beta_slow) {
    fields.fail("beta_fast", fmt::format("at least beta_slow ({})", scaling.beta_slow),
                fmt::format("{}", scaling.beta_fast));
  }
  // transformers distinguishes absent from null here.
  if (fields.has_key("truncate") && fields.get("truncate") == nullptr) {
    fields.fail("truncate", "true or false", "null");
  }
  scaling.truncate = fields.flag("truncate", true);
}

void read_longrope(ConfigFields& fields, const RopeRules& rules, const ModelConfig& config,
                   RopeScaling& scaling) {
  const auto attention = fields.find_number("attention_factor", min_attention, max_attention);
  const auto original = static_cast<double>(scaling.original_max_position_embeddings);
  scaling.attention_factor = attention.value_or(
      scaling.factor <= 1 ? 1.0 : std::sqrt(1 + std::log(scaling.factor) / std::log(original)));
  if (rules.has_mscales) {
    scaling.attention_factor = fields.number("short_mscale", min_attention, max_attention);
    fields.require("long_mscale", scaling.attention_factor);
  }
  scaling.short_factor = factors_of_longrope(fields, "short_factor", config.rotated_dims() / 2);
  scaling.long_factor = factors_of_longrope(fields, "long_factor", config.rotated_dims() / 2);
}

/// Reads mrope_section. An unusual value is none: texts do not need it.
std::vector<std::int64_t> read_image_sections(ConfigFields& fields) {
  constexpr std::size_t axes = 3;
  const json* const value = fields.get("mrope_section");
  fields.get("mrope_interleaved");
  if (value == nullptr || !value->is_array() || value->size() != axes) return {};
  std::vector<std::int64_t> sections;
  for (const json& pairs : *value) {
    if (!pairs.is_number_unsigned() || pairs.get<std::uint64_t>() > std::uint64_t{max_size})
      return {};
    sections.push_back(pairs.get<std::int64_t>());
  }
  return sections;
}

/// Reads the object `key`: "rope_scaling" (older files) or "rope_parameters" (transformers 5).
Rope parse_rope(ConfigFields& config, const std::string& key, const json& value,
                std::optional<std::int64_t> original_beside, const RopeRules& rules,
                const ModelConfig& sizes, std::vector<std::string>& warnings) {
  if (!value.is_object()) config.fail(key, "an object", files::described(value));
  for (const auto& [field, nested] : value.items()) {
    if (nested.is_object()) {
      config.fail(fmt::format("{}.{}", key, field), "one set of RoPE parameters for all layers",
                  files::described(nested));
    }
  }
  ConfigFields fields(value, config.file(), key);
  const auto current_type = fields.find_text("rope_type");
  const auto older_type = fields.find_text("type");
  if (!current_type && !older_type && fields.has_key("factor")) {
    fields.fail("rope_type", files::alternatives(rope_type_names()), "none");
  }
  std::string type = current_type ? *current_type : older_type.value_or("default");
  if (type == "mrope" && rules.has_image_sections) type = "default";

  Rope rope;
  if (rules.has_alpha && type == "dynamic" && fields.get("alpha") != nullptr) {
    rope.alpha = fields.number("alpha", 1 / max_rope_factor, max_rope_factor);
    type = "default";
    // transformers ignores these beside alpha.
    for (const char* field : {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}) {
      fields.get(field);
    }
  }
  rope.theta = find_theta(fields);
  if (rules.default_turning_part > 0 && type == "proportional") {
    rope.turning_part = fields.find_number(rotary_factor_field, 0, 1).value_or(1);
    fields.require("factor", 1);
    type = "default";
  } else if (rules.default_rotary_factor == 0 && rules.rotary_dim_field == nullptr) {
    fields.require(rotary_factor_field, 1);
  }
  fields.get(rotary_factor_field);  // see read_rotary_dim
  if (rules.has_image_sections) rope.image_sections = read_image_sections(fields);
  RopeScaling scaling;
  if (type == "linear" || type == "dynamic") {
    scaling.type = type == "linear" ? RopeType::linear : RopeType::dynamic;
    scaling.factor = fields.number("factor", 1, max_rope_factor);
    scaling.original_max_position_embeddings = sizes.max_position_embeddings;
  } else if (type == "yarn" || type == "longrope") {
    scaling.type = type == "yarn" ? RopeType::yarn : RopeType::longrope;
    scaling.original_max_position_embeddings =
        original_length(fields, original_beside, sizes, warnings);
    scaling.factor = extension(fields, scaling.type == RopeType::longrope,
                               scaling.original_max_position_embeddings, sizes);
    if (scaling.type == RopeType::yarn) {
      read_yarn(fields, scaling);
    } else {
      read_longrope(fields, rules, sizes, scaling);
    }
  } else if (type == "llama3") {
    scaling.type = RopeType::llama3;
    scaling.original_max_position_embeddings =
        original_length(fields, original_beside, sizes, warnings);
    read_llama3(fields, scaling);
  } else if (type != "default") {
    fields.fail(current_type ? "rope_type" : "type", files::alternatives(rope_type_names()),
                files::in_quotes(type));
  }
  if (type != "default") rope.scaling = scaling;
  if (rules.scales_queries) {
    fields.get("max_position_embeddings");  // transformers ignores it here
    const double beta = fields.find_number("llama_4_scaling_beta", 0, max_beta).value_or(0);
    if (beta > 0) {
      rope.query_scaling =
          QueryScaling{beta, original_length(fields, original_beside, sizes, warnings)};
    }
  }
  fields.warn_unknown({}, warnings);
  return rope;
}

/// Reads the RoPE of layers with a window. `current` becomes the parameters of the other layers if
/// they are its member full_attention, and `name` the place of this member.
void read_window_rope(ConfigFields& fields, const RopeRules& rules, const json*& current,
                      std::string& name, ModelConfig& config) {
  std::optional<double> theta;
  if (rules.default_window_theta > 0) {
    theta = fields.find_number("rope_local_base_freq", smallest_float, largest_float)
                .value_or(rules.default_window_theta);
  }
  std::optional<double> factor;
  if (rules.default_window_factor > 0) factor = rules.default_window_factor;
  const char* const field = "rope_parameters";
  if (current != nullptr && current->is_object() &&
      (current->contains("full_attention") || current->contains("sliding_attention"))) {
    ConfigFields kinds(*current, fields.file(), field);
    current = kinds.get("full_attention");
    name += ".full_attention";
    if (const json* const own = kinds.get("sliding_attention")) {
      if (!own->is_object()) kinds.fail("sliding_attention", "an object", files::described(*own));
      ConfigFields nested(*own, fields.file(), std::string(field) + ".sliding_attention");
      nested.require("rope_type", "default");
      if (!factor) nested.require(rotary_factor_field, 1);
      const auto stated_factor = nested.find_number(rotary_factor_field, 0, 1);
      if (factor && stated_factor) factor = stated_factor;
      if (const auto stated = find_theta(nested)) theta = stated;
      nested.warn_unknown({}, config.warnings);
    } else {
      factor.reset();  // there are no such layers
    }
    // transformers 5.24 leaves those of older files here, and ignores them.
    for (const char* older : {"rope_theta", "rope_type"}) kinds.get(older);
    kinds.warn_unknown({}, config.warnings);
  }
  config.window_rope_theta = theta;
  if (!factor) return;
  config.window_rotary_dim =
      static_cast<std::int64_t>(static_cast<double>(config.head_dim) * *factor);
  if (config.window_rotary_dim < 2 || config.window_rotary_dim % 2 != 0) {
    fields.fail(fmt::format("{}.sliding_attention.{}", field, rotary_factor_field),
                "an even number of rotated dimensions above 0",
                fmt::format("{} of {}", config.window_rotary_dim, config.head_dim));
  }
}

}  // namespace

const std::vector<std::string_view>& rope_type_names() {
  static const std::vector<std::string_view> names = {"default", "linear",   "dynamic",
                                                      "yarn",    "longrope", "llama3"};
  return names;
}

void read_rope(ConfigFields& fields, const RopeRules& rules, ModelConfig& config) {
  read_rotary_dim(fields, rules, config);
  auto theta = find_theta(fields);
  if (rules.has_older_names && !theta) theta = find_theta(fields, "rotary_emb_base");
  const auto original = fields.find_size("original_max_position_embeddings", max_size);
  const json* const older = fields.get("rope_scaling");
  std::string name = "rope_parameters";
  const json* current = fields.get(name);
  if (rules.default_window_theta > 0 || rules.windows_are_unscaled) {
    read_window_rope(fields, rules, current, name, config);
  }
  Rope rope;
  if (rules.default_turning_part > 0) rope.turning_part = rules.default_turning_part;
  if (older != nullptr) {
    rope = parse_rope(fields, "rope_scaling", *older, original, rules, config, config.warnings);
  }
  if (current != nullptr) {
    const Rope parsed =
        parse_rope(fields, name, *current, original, rules, config, config.warnings);
    if (older != nullptr && rope.scaling != parsed.scaling) {
      fields.fail(name, "the same as rope_scaling", files::described(*current));
    }
    if (rope.theta && parsed.theta && *rope.theta != *parsed.theta) {
      fields.fail(name + ".rope_theta", fmt::format("{} as in rope_scaling", *rope.theta),
                  fmt::format("{}", *parsed.theta));
    }
    rope.scaling = parsed.scaling;
    rope.query_scaling = parsed.query_scaling;
    rope.image_sections = parsed.image_sections;
    rope.alpha = parsed.alpha;
    rope.turning_part = parsed.turning_part;
    if (parsed.theta) rope.theta = parsed.theta;
  }
  if (theta && rope.theta && *theta != *rope.theta) {
    fields.fail("rope_theta", fmt::format("{} as in the RoPE parameters", *rope.theta),
                fmt::format("{}", *theta));
  }
  config.rope_theta = rope.theta.value_or(theta.value_or(rules.default_theta));
  if (rope.alpha) {
    const auto dim = static_cast<double>(config.head_dim);
    config.rope_theta *= std::pow(*rope.alpha, dim / (dim - 2));
  }
  config.rope_scaling = rope.scaling;
  config.query_scaling = rope.query_scaling;
  config.image_sections = rope.image_sections;
  config.turning_part = rope.turning_part;
  if (rules.windows_are_unscaled && !config.window_rope_theta) {
    config.window_rope_theta = config.rope_theta;
  }
  if (!config.rope_scaling) return;
  if (const std::string problem = rope_problem(config, *config.rope_scaling); !problem.empty()) {
    throw Error(fmt::format("{}: {}", fields.file(), problem));
  }
}

}  // namespace kvzap::model
