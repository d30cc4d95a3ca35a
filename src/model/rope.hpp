// RoPE scaling as the reader of config.json needs it.
#pragma once

#include <kvzap/model/model_config.hpp>
#include <string>

namespace kvzap::model {

/// A bound far above any published model.
inline constexpr double max_rope_factor = 1e6;

/// Returns YaRN's attention factor for a config.json without one (arXiv 2309.00071, equation 22),
/// with DeepSeek's mscale and mscale_all_dim (0: not given).
double yarn_attention_factor(double factor, double mscale, double mscale_all_dim);

/// Returns why a model's sizes do not fit a scaling, with the field; "" if they fit.
std::string rope_problem(const ModelConfig& config, const RopeScaling& scaling);

}  // namespace kvzap::model
