// Frequencies of RoPE, in the order of operations of transformers' modeling_rope_utils.py.
#include "model/rope.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace kvzap {
namespace {

/// Returns the result of torch for float32 `base ** exponent`, which is a correctly rounded double.
float power(float base, float exponent) {
  return static_cast<float>(std::pow(static_cast<double>(base), static_cast<double>(exponent)));
}

/// base^(2i / head_dim).
std::vector<float> wavelengths(float base, std::int64_t head_dim) {
  const auto dim = static_cast<float>(head_dim);
  std::vector<float> powers(static_cast<std::size_t>(head_dim / 2));
  for (std::size_t i = 0; i < powers.size(); ++i) {
    powers[i] = power(base, static_cast<float>(2 * i) / dim);
  }
  return powers;
}

void scale_llama3(const RopeScaling& scaling, std::vector<float>& frequencies) {
  const auto original = static_cast<double>(scaling.original_max_position_embeddings);
  const auto low_freq_wavelen = static_cast<float>(original / scaling.low_freq_factor);
  const auto high_freq_wavelen = static_cast<float>(original / scaling.high_freq_factor);
  const auto factor = static_cast<float>(scaling.factor);
  const auto low = static_cast<float>(scaling.low_freq_factor);
  const auto span = static_cast<float>(scaling.high_freq_factor - scaling.low_freq_factor);
  constexpr auto two_pi = static_cast<float>(6.283185307179586);
  for (float& frequency : frequencies) {
    // torch computes number / tensor as the reciprocal of the tensor times the number.
    const float wavelen = (1.0f / frequency) * two_pi;
    if (wavelen > low_freq_wavelen) {
      frequency = frequency / factor;
    } else if (wavelen >= high_freq_wavelen && span > 0) {
      const float smooth = ((1.0f / wavelen) * static_cast<float>(original) - low) / span;
      frequency = (1.0f - smooth) * frequency / factor + smooth * frequency;
    }
  }
}

/// `powers` holds base^(2i / head_dim) and receives the frequencies.
void scale_yarn(const RopeScaling& scaling, double theta, std::int64_t head_dim,
                std::vector<float>& powers) {
  constexpr double pi = 3.141592653589793;
  const auto dim = static_cast<double>(head_dim);
  // The dimension that makes `turns` rotations within the original length.
  const auto dimension_of = [&](double turns) {
    return dim *
           std::log(static_cast<double>(scaling.original_max_position_embeddings) /
                    (turns * 2 * pi)) /
           (2 * std::log(theta));
  };
  double low = dimension_of(scaling.beta_fast);
  double high = dimension_of(scaling.beta_slow);
  if (scaling.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1);
  if (low == high) high += 0.001;
  const auto begin = static_cast<float>(low);
  const auto width = static_cast<float>(high - low);
  const auto factor = static_cast<float>(scaling.factor);
  for (std::size_t i = 0; i < powers.size(); ++i) {
    const float kept = 1.0f / powers[i];
    const float stretched = 1.0f / (factor * powers[i]);
    const float ramp = std::clamp((static_cast<float>(i) - begin) / width, 0.0f, 1.0f);
    const float share_kept = 1.0f - ramp;
    powers[i] = stretched * (1.0f - share_kept) + kept * share_kept;
  }
}

/// Returns the base of dynamic scaling at a length beyond the original one. transformers computes
/// it in float32, from the length on.
float dynamic_base(const RopeScaling& scaling, double theta, std::int64_t head_dim,
                   std::int64_t length) {
  const auto original = static_cast<float>(scaling.original_max_position_embeddings);
  const float grown = static_cast<float>(scaling.factor) * static_cast<float>(length) / original -
                      static_cast<float>(scaling.factor - 1);
  const double exponent = static_cast<double>(head_dim) / static_cast<double>(head_dim - 2);
  return static_cast<float>(theta) *
         static_cast<float>(std::pow(static_cast<double>(grown), exponent));
}

}  // namespace

namespace model {

double yarn_attention_factor(double factor, double mscale, double mscale_all_dim) {
  const auto scale = [&](double by) {
    return factor <= 1 ? 1.0 : 0.1 * by * std::log(factor) + 1.0;
  };
  if (mscale != 0 && mscale_all_dim != 0) return scale(mscale) / scale(mscale_all_dim);
  return scale(1);
}

std::string rope_problem(const ModelConfig& config, const RopeScaling& scaling) {
  if (scaling.type == RopeType::yarn && !(config.rope_theta > 1)) {
    return fmt::format("rope_theta: expected a number above 1 with RoPE of type yarn, found {}",
                       config.rope_theta);
  }
  if (scaling.type == RopeType::dynamic && config.rotated_dims() < 4) {
    return fmt::format(
        "head_dim: expected at least 4 rotated dimensions with RoPE of type dynamic, found {}",
        config.rotated_dims());
  }
  return "";
}

}  // namespace model

std::string_view name_of(RopeType type) {
  switch (type) {
    case RopeType::linear:
      return "linear";
    case RopeType::dynamic:
      return "dynamic";
    case RopeType::yarn:
      return "yarn";
    case RopeType::longrope:
      return "longrope";
    case RopeType::llama3:
      return "llama3";
  }
  return "unknown";
}

bool RopeScaling::operator==(const RopeScaling& other) const {
  return type == other.type && factor == other.factor &&
         original_max_position_embeddings == other.original_max_position_embeddings &&
         attention_factor == other.attention_factor && low_freq_factor == other.low_freq_factor &&
         high_freq_factor == other.high_freq_factor && beta_fast == other.beta_fast &&
         beta_slow == other.beta_slow && truncate == other.truncate &&
         short_factor == other.short_factor && long_factor == other.long_factor;
}

std::int64_t ModelConfig::longest_context() const {
  // Positions are 32-bit numbers in the cache.
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  const std::int64_t bound = attention_top_k > 0 ? std::min(attention_top_k, most) : most;
  if (!rope_scaling || rope_scaling->type == RopeType::llama3) {
    return std::min(max_position_embeddings, bound);
  }
  const double longest =
      static_cast<double>(rope_scaling->original_max_position_embeddings) * rope_scaling->factor;
  // A factor that was derived from lengths gives these lengths back.
  const auto scaled =
      static_cast<std::int64_t>(std::min(std::floor(longest + 1e-6), static_cast<double>(bound)));
  return std::min(std::max(max_position_embeddings, scaled), bound);
}

float ModelConfig::rope_attention_factor() const {
  return rope_scaling ? static_cast<float>(rope_scaling->attention_factor) : 1.0f;
}

RopeScaling rope_scaling_by_factor(const ModelConfig& config, RopeType type, double factor) {
  if (type != RopeType::linear && type != RopeType::dynamic && type != RopeType::yarn) {
    throw Error(
        fmt::format("RoPE scaling {}: needs more than a factor; expected linear, dynamic "
                    "or yarn",
                    name_of(type)));
  }
  if (!(factor >= 1 && factor <= model::max_rope_factor)) {
    throw Error(fmt::format("RoPE scaling {}: factor: expected a number from 1 to {}, found {}",
                            name_of(type), model::max_rope_factor, factor));
  }
  RopeScaling scaling;
  scaling.type = type;
  scaling.factor = factor;
  scaling.original_max_position_embeddings = config.max_position_embeddings;
  if (type == RopeType::yarn) {
    scaling.attention_factor = model::yarn_attention_factor(factor, 0, 0);
  }
  const std::string problem = model::rope_problem(config, scaling);
  if (!problem.empty()) throw Error(problem);
  return scaling;
}

namespace {

/// The frequencies of the pairs that turn.
std::vector<float> rotary_frequencies(const ModelConfig& config, std::int64_t length) {
  const std::int64_t dim = config.rotated_dims();
  auto base = static_cast<float>(config.rope_theta);
  const auto& scaling = config.rope_scaling;
  const bool is_long = scaling && length > scaling->original_max_position_embeddings;
  if (is_long && scaling->type == RopeType::dynamic) {
    base = dynamic_base(*scaling, config.rope_theta, dim, length);
  }
  std::vector<float> frequencies = wavelengths(base, dim);
  if (scaling && scaling->type == RopeType::yarn) {
    scale_yarn(*scaling, config.rope_theta, dim, frequencies);
    return frequencies;
  }
  if (scaling && scaling->type == RopeType::longrope) {
    const auto& factors = is_long ? scaling->long_factor : scaling->short_factor;
    for (std::size_t i = 0; i < frequencies.size(); ++i) {
      frequencies[i] = 1.0f / (static_cast<float>(factors[i]) * frequencies[i]);
    }
    return frequencies;
  }
  for (float& frequency : frequencies) frequency = 1.0f / frequency;
  if (scaling && scaling->type == RopeType::llama3) scale_llama3(*scaling, frequencies);
  if (scaling && scaling->type == RopeType::linear) {
    for (float& frequency : frequencies) frequency /= static_cast<float>(scaling->factor);
  }
  return frequencies;
}

}  // namespace

std::vector<float> rope_inverse_frequencies(const ModelConfig& config, std::int64_t length) {
  std::vector<float> frequencies = rotary_frequencies(config, length);
  if (config.turning_part < 1) {
    const double turning = config.turning_part * static_cast<double>(config.head_dim);
    frequencies.resize(static_cast<std::size_t>(turning) / 2);
  }
  frequencies.resize(static_cast<std::size_t>(config.head_dim / 2), 0.0f);
  return frequencies;
}

ModelConfig with_window_rope(const ModelConfig& config) {
  ModelConfig other = config;
  if (config.window_rope_theta) {
    other.rope_theta = *config.window_rope_theta;
    other.rope_scaling.reset();
    other.turning_part = 1;
    if (config.window_rotary_dim > 0) other.rotary_dim = config.window_rotary_dim;
    for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
      if (config.layer(l).window > 0) other.head_dim = config.head_dim_of(l);
    }
  }
  return other;
}

}  // namespace kvzap

namespace kvzap::model {

std::vector<std::int64_t> rotation_order(const ModelConfig& config, std::int64_t layer) {
  const std::int64_t head_dim = config.head_dim_of(layer), half = head_dim / 2;
  // Heads of layers with other sizes turn whole.
  std::int64_t turning = head_dim == config.head_dim ? config.rotated_dims() / 2 : half;
  const bool has_own = config.window_rotary_dim > 0 && config.layer(layer).window > 0;
  if (has_own) turning = config.window_rotary_dim / 2;
  std::vector<std::int64_t> order(static_cast<std::size_t>(head_dim));
  for (std::int64_t i = 0; i < half; ++i) {
    std::int64_t low = turning + i, high = half + i;  // dimensions that do not turn
    if (i < turning) {
      low = config.rope_is_interleaved ? 2 * i : i;
      high = config.rope_is_interleaved ? 2 * i + 1 : turning + i;
      if (config.rope_is_reversed) std::swap(low, high);
    }
    order[static_cast<std::size_t>(i)] = low;
    order[static_cast<std::size_t>(half + i)] = high;
  }
  return order;
}

}  // namespace kvzap::model
