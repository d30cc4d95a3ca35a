// Reads the weights of latent attention.
#pragma once

#include <string>
#include <utility>

#include "model/model_weights.hpp"
#include "model/weights.hpp"

namespace kvzap::model {

/// Reads the maps of a layer for a rank's query heads, first … last - 1. prefix: of its maps, such
/// as "model.layers.3.self_attn.". The output map is not among them.
Model::Weights::Latent read_latent(const WeightSource& source, const ModelConfig& config,
                                   const std::string& prefix,
                                   std::pair<std::int64_t, std::int64_t> heads);

}  // namespace kvzap::model
