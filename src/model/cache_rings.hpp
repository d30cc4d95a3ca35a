// Which layers of a model keep their whole cache in a ring.
#pragma once

#include <kvzap/core/cache.hpp>
#include <kvzap/model/model_config.hpp>
#include <vector>

namespace kvzap::model {

/// Returns the rings of the layers whose attention does not see all tokens; empty if there are
/// none. A query and window - 1 older rows fill a window.
std::vector<OwnRing> own_rings(const ModelConfig& config);

/// Returns the number of layers that see all tokens.
std::int64_t full_layers(const ModelConfig& config);

/// Throws Error for a model without such layers, which nothing can prune.
void require_full_layers(const ModelConfig& config);

}  // namespace kvzap::model
