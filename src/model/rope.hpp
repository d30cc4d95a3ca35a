// RoPE as readers of config.json and of weights need it.
#pragma once

#include <kvzap/model/model_config.hpp>
#include <string>
#include <vector>

namespace kvzap::model {

/// A bound far above any published model.
inline constexpr double max_rope_factor = 1e6;

/// Returns YaRN's attention factor for a config.json without one (arXiv 2309.00071, equation 22),
/// with DeepSeek's mscale and mscale_all_dim (0: not given).
double yarn_attention_factor(double factor, double mscale, double mscale_all_dim);

/// Returns why a model's sizes do not fit a scaling, with the field; "" if they fit.
std::string rope_problem(const ModelConfig& config, const RopeScaling& scaling);

/// Returns the dimensions of a layer's heads in the engine's order, in which RoPE rotates i with i
/// + head_dim / 2 (ModelConfig::rotates_halves).
std::vector<std::int64_t> rotation_order(const ModelConfig& config, std::int64_t layer);

}  // namespace kvzap::model
