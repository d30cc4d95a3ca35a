// What reading a model's config.json needs to know of RoPE scaling.
#pragma once

#include <kvzap/model/model_config.hpp>
#include <string>

namespace kvzap::detail {

/// Far above any published model.
inline constexpr double max_rope_factor = 1e6;

/// YaRN's attention factor where config.json has none (arXiv 2309.00071, equation 22, and what
/// DeepSeek's mscale and mscale_all_dim make of it; 0: not given).
double yarn_attention_factor(double factor, double mscale, double mscale_all_dim);

/// Why a model's sizes do not go with a scaling, naming the field; "" if they do.
std::string rope_problem(const ModelConfig& config, const RopeScaling& scaling);

}  // namespace kvzap::detail
