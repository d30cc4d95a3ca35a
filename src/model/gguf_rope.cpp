// RoPE in the metadata and tensors of a GGUF file.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "files/decimal.hpp"
#include "files/quote.hpp"
#include "model/gguf_fields.hpp"
#include "model/gguf_latent.hpp"
#include "model/gguf_metadata.hpp"

namespace kvzap::model {

using gguf::TensorEntry;
using nlohmann::json;

namespace {

constexpr const char* type_key = "rope.scaling.type";
constexpr const char* freqs_name = "rope_freqs.weight";
constexpr const char* long_name = "rope_factors_long.weight";
constexpr const char* short_name = "rope_factors_short.weight";
constexpr const char* attention_key = "rope.scaling.attn_factor";
constexpr const char* log_multiplier_key = "rope.scaling.yarn_log_multiplier";

// Rows of the object rope_scaling.

void factor_row(GgufFields& f) {
  f.positive("rope.scaling.factor", "factor", f.model.rope_scaling->factor);
}

void original_length(GgufFields& f) {
  constexpr const char* key = "rope.scaling.original_context_length";
  f.config["original_max_position_embeddings"] = f.find_integer(key, 1).value_or(f.context);
  f.add(key, f.model.rope_scaling->original_max_position_embeddings);
}

void yarn(GgufFields& f) {
  constexpr double tolerance = 1e-6;
  const RopeScaling& scaling = *f.model.rope_scaling;
  const double growth = 0.1 * std::log(scaling.factor);
  // The attention factor is (growth + 1) / (multiplier growth + 1).
  const double multiplier = growth > 0 ? ((growth + 1) / scaling.attention_factor - 1) / growth : 0;
  const bool is_usual = std::abs(multiplier * growth) < tolerance;
  const bool has_multiplier = f.architecture.name == "mistral3";
  const bool is_latent = f.architecture.has_latents;
  // No key says so: gpt-oss does not round, other architectures do.
  const bool truncates = f.architecture.name != "gpt-oss";
  f.demand("rope_parameters.truncate", truncates, scaling.truncate);
  if (!truncates) f.config["truncate"] = false;
  if (!(is_usual || has_multiplier || is_latent) ||
      (growth == 0 && std::abs(scaling.attention_factor - 1) > tolerance)) {
    refuse_scaling(f);
  }
  f.add(type_key, "yarn");
  factor_row(f);
  original_length(f);
  f.number("rope.scaling.yarn_beta_fast", "beta_fast", scaling.beta_fast);
  f.number("rope.scaling.yarn_beta_slow", "beta_slow", scaling.beta_slow);
  if (is_latent) return latent_yarn(f);
  if (!is_usual) f.add(log_multiplier_key, multiplier);
  // Files of OLMo 3 have the whole factor, as its config.json.
  const bool has_factor = f.architecture.name == "olmo2";
  const double attention = has_factor ? f.find_factor(attention_key, 0) : 0;
  if (attention != 0) f.config["attention_factor"] = attention;
  const double all_dim = has_multiplier ? f.find_factor(log_multiplier_key, 0) : 0;
  if (all_dim == 0) return;
  f.config["mscale"] = 1.0;
  f.config["mscale_all_dim"] = all_dim;
}

/// The scaling of Phi-3. Its factors are tensors.
void longrope(GgufFields& f) {
  original_length(f);
  f.factor(attention_key, "attention_factor", 1, f.model.rope_scaling->attention_factor);
  if (f.architecture.name != "phimoe") return;
  for (const char* field : {"short_mscale", "long_mscale"}) {
    f.config[field] = f.config["attention_factor"];
  }
  f.config.erase("attention_factor");
}

/// Returns the object that rows add to `start`.
json object_of(GgufFields& f, json start, void (*rows)(GgufFields& f)) {
  std::swap(f.config, start);
  rows(f);
  std::swap(f.config, start);
  return start;
}

/// Returns rope_scaling of the keys; null: none.
json scaling_of_keys(GgufFields& f) {
  constexpr const char* older_key = "rope.scale_linear";
  const auto type = f.metadata().find_string(f.read(type_key));
  if (type == "yarn") return object_of(f, {{"rope_type", "yarn"}}, yarn);
  if (type == "linear" || (!type && f.metadata().has(f.own(older_key)))) {
    const double factor = f.above_0(type ? "rope.scaling.factor" : older_key);
    if (factor == 1) return nullptr;
    return {{"rope_type", "linear"}, {"factor", factor}};
  }
  if (type && *type != "none" && !(type == "longrope" && f.tensor(long_name) != nullptr)) {
    f.fail_key(type_key, "none, linear or yarn", files::in_quotes(*type));
  }
  return nullptr;
}

/// Reads a factor for each pair of values that RoPE turns.
std::vector<float> factors_of(const GgufFields& f, const TensorEntry& tensor) {
  const std::int64_t pairs = f.rotary_dim / 2;
  const std::int64_t stored = f.architecture.halves_full_rope ? 2 * pairs : pairs;
  const std::string where = fmt::format("{}: tensor '{}'", *tensor.file, tensor.name);
  if (tensor.shape != std::vector<std::int64_t>{stored} || tensor.format == nullptr ||
      tensor.format->name != "F32") {
    throw Error(fmt::format("{}: expected {} values of type F32, found {} of type {}", where,
                            stored, tensor.shape.back(), type_name(tensor)));
  }
  std::vector<float> factors(static_cast<std::size_t>(pairs));
  std::memcpy(factors.data(), tensor.data, factors.size() * sizeof(float));
  for (const float factor : factors) {
    if (std::isfinite(factor) && factor > 0) continue;
    throw Error(fmt::format("{}: expected finite values above 0, found {}", where, factor));
  }
  return factors;
}

/// Returns the shortest decimal numbers that are these floats: those of the model's authors.
std::vector<double> decimal(const std::vector<float>& values) {
  std::vector<double> numbers(values.size());
  std::transform(values.begin(), values.end(), numbers.begin(), files::decimal_of);
  return numbers;
}

/// Returns the scaling of Phi-3: two sets of factors.
json scaling_of_phi3(GgufFields& f, const TensorEntry& long_tensor) {
  const TensorEntry* const short_tensor = f.tensor(short_name);
  if (short_tensor == nullptr) {
    throw Error(fmt::format("{}: tensor '{}' is missing beside '{}'", *long_tensor.file, short_name,
                            long_tensor.name));
  }
  return object_of(f,
                   {{"rope_type", "longrope"},
                    {"short_factor", decimal(factors_of(f, *short_tensor))},
                    {"long_factor", decimal(factors_of(f, long_tensor))}},
                   longrope);
}

/// Returns Llama 3's scaling if its published settings give these factors, else null.
json llama3_scaling(const GgufFields& f, const std::vector<float>& factors, double factor,
                    double high) {
  constexpr double low = 1, tolerance = 1e-4;
  constexpr std::int64_t original = 8192;
  ModelConfig model;
  model.head_dim = f.head_dim;
  model.rotary_dim = f.rotary_dim;
  model.rope_theta = f.config.at("rope_theta").get<double>();
  model.rope_scaling =
      RopeScaling{RopeType::llama3, factor, original, 1, low, high, 0, 0, false, {}, {}};
  const std::vector<float> expected = rope_factors(model).front().values;
  for (std::size_t i = 0; i < factors.size(); ++i) {
    if (!(std::fabs(expected[i] - factors[i]) <= tolerance * expected[i])) return nullptr;
  }
  return {{"rope_type", "llama3"},
          {"factor", factor},
          {"low_freq_factor", low},
          {"high_freq_factor", high},
          {"original_max_position_embeddings", original}};
}

/// Returns the scaling that divides RoPE's frequencies by the factors of a tensor, which
/// converters write for Llama 3.1 and newer.
json scaling_of_factors(const GgufFields& f, const TensorEntry& tensor) {
  const std::vector<float> factors = factors_of(f, tensor);
  const double largest = *std::max_element(factors.begin(), factors.end());
  if (largest == 1 && *std::min_element(factors.begin(), factors.end()) == 1) return nullptr;
  // Llama 3 interpolates wavelengths between two limits. In Llama 4 both limits are the same.
  for (const double high : {4.0, 1.0}) {
    if (json llama3 = llama3_scaling(f, factors, largest, high); !llama3.is_null()) return llama3;
  }
  // This kind of scaling takes any factors.
  return {{"rope_type", "longrope"}, {"factor", 1.0},
          {"attention_factor", 1.0}, {"original_max_position_embeddings", f.context},
          {"short_factor", factors}, {"long_factor", factors}};
}

void read_scaling(GgufFields& f) {
  json scaling = scaling_of_keys(f);
  const auto replace = [&](const TensorEntry& tensor, json by) {
    if (!scaling.is_null()) {
      f.fail_key(type_key, fmt::format("none beside the tensor '{}'", tensor.name),
                 files::in_quotes(scaling["rope_type"].get<std::string>()));
    }
    scaling = std::move(by);
  };
  if (const TensorEntry* const factors = f.tensor(freqs_name)) {
    replace(*factors, scaling_of_factors(f, *factors));
  }
  if (const TensorEntry* const factors = f.tensor(long_name)) {
    replace(*factors, scaling_of_phi3(f, *factors));
  }
  if (!scaling.is_null()) f.config["rope_scaling"] = std::move(scaling);
}

void write_scaling(GgufFields& f) {
  if (!f.model.rope_scaling) return;
  const RopeType type = f.model.rope_scaling->type;
  if (type == RopeType::llama3) return;  // rope_factors
  if (type == RopeType::yarn) {
    yarn(f);
  } else if (type == RopeType::linear) {
    f.add(type_key, "linear");
    factor_row(f);
  } else if (type == RopeType::longrope && has_two_rope_factors(f)) {
    longrope(f);
  } else {
    refuse_scaling(f);
  }
}

}  // namespace

bool has_two_rope_factors(const GgufFields& fields) {
  const std::string_view name = fields.architecture.name;
  return name == "phi3" || name == "phimoe" || name == "minicpm3";
}

void rope_fields(GgufFields& f) {
  constexpr double absent_theta = 10000;
  f.positive("rope.freq_base", "rope_theta", f.model.rope_theta, absent_theta);
  f.add("rope.dimension_count", (f.architecture.halves_full_rope ? 2 : 1) * f.rotary_dim);
  if (f.reads()) {
    read_scaling(f);
  } else {
    write_scaling(f);
  }
}

std::vector<float> rope_factors_of(const GgufFields& fields, const char* name) {
  const TensorEntry* const tensor = fields.tensor(name);
  if (tensor != nullptr) return factors_of(fields, *tensor);
  throw Error(fmt::format("{}: tensor '{}' of shape [{}] is missing", fields.metadata().file(),
                          name, fields.rotary_dim / 2));
}

void require_scaling_by_keys(const GgufFields& fields, bool may_be_yarn) {
  if (!fields.model.rope_scaling) return;
  const RopeType type = fields.model.rope_scaling->type;
  fields.require(type == RopeType::linear || (type == RopeType::yarn && may_be_yarn),
                 "RoPE scaling", may_be_yarn ? "linear or yarn" : "linear", name_of(type));
}

void refuse_scaling(const GgufFields& fields) {
  fields.fail("RoPE scaling", "linear, llama3, or yarn with its usual attention factor",
              name_of(fields.model.rope_scaling->type));
}

std::vector<RopeFactors> rope_factors(const ModelConfig& config) {
  if (config.scales_layers) {  // Gemma 4: pairs that do not turn have a very large factor
    constexpr float still = 1e30F;
    RopeFactors factors{freqs_name, {}};
    for (const float frequency : rope_inverse_frequencies(config, 0)) {
      factors.values.push_back(frequency > 0 ? 1 : still);
    }
    return {factors};
  }
  if (!config.rope_scaling) return {};
  const RopeScaling& scaling = *config.rope_scaling;
  if (scaling.type == RopeType::longrope) {
    return {{long_name, {scaling.long_factor.begin(), scaling.long_factor.end()}},
            {short_name, {scaling.short_factor.begin(), scaling.short_factor.end()}}};
  }
  if (scaling.type != RopeType::llama3) return {};
  RopeFactors factors{freqs_name, {}};
  const std::vector<float> scaled = rope_inverse_frequencies(config, 0);
  for (std::int64_t i = 0; i < config.rotated_dims() / 2; ++i) {
    const double exponent = 2 * static_cast<double>(i) / static_cast<double>(config.rotated_dims());
    factors.values.push_back(static_cast<float>(std::pow(config.rope_theta, -exponent) /
                                                scaled[static_cast<std::size_t>(i)]));
  }
  // Layers with a window may turn more values, without factors.
  const std::int64_t most = std::max(config.rotated_dims(), config.window_rotary_dim) / 2;
  factors.values.resize(static_cast<std::size_t>(most), 1.0F);
  return {factors};
}

}  // namespace kvzap::model
