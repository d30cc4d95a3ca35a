// RoPE's fields of config.json from the metadata and tensors of a GGUF file.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <kvzap/core/types.hpp>
#include <string>
#include <vector>

#include "files/decimal.hpp"
#include "files/quote.hpp"
#include "gguf/config_values.hpp"

namespace kvzap::gguf {

using nlohmann::json;

namespace {

/// Makes the fields of one file.
class RopeMaker {
 public:
  RopeMaker(ConfigValues& values, const ConfigSizes& sizes) : m_values(values), m_sizes(sizes) {}

  void add(json& config) {
    const auto base = m_values.find_number("rope.freq_base");
    m_theta = base ? m_values.positive("rope.freq_base") : 10000.0;
    config["rope_theta"] = m_theta;
    json scaling = scaling_of_keys();
    const GgufFile& file = m_values.file();
    const TensorEntry* const factors = file.find("rope_freqs.weight");
    if (factors != nullptr) replace(scaling, *factors, scaling_of_factors(*factors));
    const TensorEntry* const long_factors = file.find("rope_factors_long.weight");
    if (long_factors != nullptr) replace(scaling, *long_factors, longrope(*long_factors));
    if (!scaling.is_null()) config["rope_scaling"] = std::move(scaling);
  }

 private:
  void replace(json& scaling, const TensorEntry& tensor, json by) const {
    if (!scaling.is_null()) {
      m_values.fail("rope.scaling.type", fmt::format("none beside the tensor '{}'", tensor.name),
                    files::in_quotes(scaling["rope_type"].get<std::string>()));
    }
    scaling = std::move(by);
  }

  std::int64_t original_context() const {
    return m_values.find_integer("rope.scaling.original_context_length", 1)
        .value_or(m_sizes.context);
  }

  json scaling_of_keys() {
    const auto type = m_values.find_string("rope.scaling.type");
    if (type == "yarn") return yarn();
    const bool is_older = m_values.metadata().has(m_values.own("rope.scale_linear"));
    if (type == "linear" || (!type && is_older)) {
      const double factor = m_values.positive(type ? "rope.scaling.factor" : "rope.scale_linear");
      if (factor == 1) return nullptr;
      return {{"rope_type", "linear"}, {"factor", factor}};
    }
    const bool has_long_factors = m_values.has_tensor("rope_factors_long.weight");
    if (type && *type != "none" && !(type == "longrope" && has_long_factors)) {
      m_values.fail("rope.scaling.type", "none, linear or yarn", files::in_quotes(*type));
    }
    return nullptr;
  }

  json yarn() {
    json scaling = {{"rope_type", "yarn"}, {"factor", m_values.positive("rope.scaling.factor")}};
    scaling["original_max_position_embeddings"] = original_context();
    for (const char* name : {"beta_fast", "beta_slow"}) {
      const auto beta = m_values.find_number(fmt::format("rope.scaling.yarn_{}", name));
      if (beta) scaling[name] = *beta;
    }
    // The file has no key for it; published models of this architecture do not round.
    if (m_values.architecture().name == "gpt-oss") scaling["truncate"] = false;
    // Files of OLMo 3 have the whole factor, as its config.json.
    const double attention = m_values.architecture().name == "olmo2"
                                 ? m_values.factor("rope.scaling.attn_factor", 0)
                                 : 0;
    if (attention != 0) scaling["attention_factor"] = attention;
    if (m_values.architecture().name != "mistral3") return scaling;
    const double all_dim = m_values.factor("rope.scaling.yarn_log_multiplier", 0);
    if (all_dim != 0) {
      scaling["mscale"] = 1.0;
      scaling["mscale_all_dim"] = all_dim;
    }
    return scaling;
  }

  /// Reads a factor for each pair of values that RoPE turns.
  std::vector<float> factors_of(const TensorEntry& tensor) const {
    const std::int64_t pairs = m_sizes.rotary_dim / 2;
    const std::string where = fmt::format("{}: tensor '{}'", *tensor.file, tensor.name);
    if (tensor.shape != std::vector<std::int64_t>{pairs} || tensor.format == nullptr ||
        tensor.format->name != "F32") {
      throw Error(fmt::format("{}: expected {} values of type F32, found {} of type {}", where,
                              pairs, tensor.shape.back(), type_name(tensor)));
    }
    std::vector<float> factors(static_cast<std::size_t>(pairs));
    std::memcpy(factors.data(), tensor.data, tensor.bytes);
    for (const float factor : factors) {
      if (std::isfinite(factor) && factor > 0) continue;
      throw Error(fmt::format("{}: expected finite values above 0, found {}", where, factor));
    }
    return factors;
  }

  /// Returns the scaling of Phi-3: two sets of factors.
  json longrope(const TensorEntry& long_tensor) {
    constexpr const char* short_name = "rope_factors_short.weight";
    const TensorEntry* const short_tensor = m_values.file().find(short_name);
    if (short_tensor == nullptr) {
      throw Error(fmt::format("{}: tensor '{}' is missing beside '{}'", *long_tensor.file,
                              short_name, long_tensor.name));
    }
    return {{"rope_type", "longrope"},
            {"attention_factor", m_values.factor("rope.scaling.attn_factor", 1)},
            {"original_max_position_embeddings", original_context()},
            {"short_factor", decimal(factors_of(*short_tensor))},
            {"long_factor", decimal(factors_of(long_tensor))}};
  }

  /// Returns the shortest decimal numbers that are these floats: those of the model's authors.
  static std::vector<double> decimal(const std::vector<float>& values) {
    std::vector<double> numbers;
    numbers.reserve(values.size());
    for (const float value : values) numbers.push_back(files::decimal_of(value));
    return numbers;
  }

  /// Returns the scaling that divides RoPE's frequencies by the factors of a tensor, which
  /// converters write for Llama 3.1 and newer.
  json scaling_of_factors(const TensorEntry& tensor) const {
    const std::vector<float> factors = factors_of(tensor);
    const double largest = *std::max_element(factors.begin(), factors.end());
    if (largest == 1 && *std::min_element(factors.begin(), factors.end()) == 1) return nullptr;
    // Llama 3 interpolates wavelengths between two limits. In Llama 4 both limits are the same.
    for (const double high : {4.0, 1.0}) {
      if (json llama3 = llama3_scaling(factors, largest, high); !llama3.is_null()) return llama3;
    }
    // This kind of scaling takes any factors.
    return {{"rope_type", "longrope"}, {"factor", 1.0},
            {"attention_factor", 1.0}, {"original_max_position_embeddings", m_sizes.context},
            {"short_factor", factors}, {"long_factor", factors}};
  }

  /// Returns Llama 3's scaling if its published settings give these factors, else null.
  json llama3_scaling(const std::vector<float>& factors, double factor, double high) const {
    constexpr double low = 1, original = 8192;
    for (std::size_t i = 0; i < factors.size(); ++i) {
      const double wavelength =
          2 * M_PI *
          std::pow(m_theta, 2 * static_cast<double>(i) / static_cast<double>(m_sizes.rotary_dim));
      const double turns = original / wavelength;
      const double smooth = high > low ? (turns - low) / (high - low) : turns > low ? 2 : -1;
      const double expected = smooth > 1   ? 1
                              : smooth < 0 ? factor
                                           : 1 / ((1 - smooth) / factor + smooth);
      constexpr double tolerance = 1e-4;
      if (!(std::fabs(expected - factors[i]) <= tolerance * expected)) return nullptr;
    }
    return {{"rope_type", "llama3"},
            {"factor", factor},
            {"low_freq_factor", low},
            {"high_freq_factor", high},
            {"original_max_position_embeddings", static_cast<std::int64_t>(original)}};
  }

  ConfigValues& m_values;
  const ConfigSizes& m_sizes;
  double m_theta = 0;
};

}  // namespace

void add_rope_fields(ConfigValues& values, const ConfigSizes& sizes, json& config) {
  RopeMaker(values, sizes).add(config);
}

}  // namespace kvzap::gguf
