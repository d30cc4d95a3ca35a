// Checkpoints with an output head of their own beside a config.json that ties it to the embedding.
#pragma once

#include <filesystem>
#include <kvzap/model/model_config.hpp>

namespace kvzap::model {

/// Unties the output head of `config` and adds a warning if the weights of `model` have an
/// lm_head.weight that differs from the embedding, as transformers 5 does. Compares all values of
/// both. Leaves the config alone if `model` has no readable weights: opening them tells why.
void untie_own_head(const std::filesystem::path& model, ModelConfig& config);

/// Ties the output head to the embedding if the weights have an embedding and no head. For models
/// of texts and images whose config.json does not say: most of their classes tie by default.
void tie_missing_head(const std::filesystem::path& model, ModelConfig& config);

}  // namespace kvzap::model
