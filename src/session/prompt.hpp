// Token ids of a context and of questions about it.
#pragma once

#include <kvzap/model/model_config.hpp>
#include <string>
#include <vector>

namespace kvzap::detail {

/// Throws Error, which names `source`, for an id outside the model's vocabulary.
void check_ids(const std::vector<TokenId>& ids, const ModelConfig& config,
               const std::string& source);

}  // namespace kvzap::detail
