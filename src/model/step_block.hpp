// Blocks of tokens in which a step passes a layer.
#pragma once

#include <algorithm>
#include <kvzap/model/model_config.hpp>

#include "base/kokkos_compat.hpp"

namespace kvzap::model {

/// Returns the most tokens whose activations exist at once. With this many, products run at full
/// rate, and activations stay small beside weights and cache. A GPU needs more tokens to be full,
/// and its launches then cost less for each. With experts, the tokens of a block share them: there
/// are so many that an expert has 128 on average, within bounds.
inline std::int64_t block_tokens(const ModelConfig& config) {
  constexpr std::int64_t dense = base::runs_on_host ? 512 : 2048;
  constexpr std::int64_t most = 4096, tokens_of_expert = 128;
  if (!config.experts) return dense;
  const ExpertsConfig& experts = *config.experts;
  const std::int64_t wanted = tokens_of_expert * experts.count / experts.per_token;
  return std::clamp((wanted + dense - 1) / dense * dense, dense, most);
}

}  // namespace kvzap::model
