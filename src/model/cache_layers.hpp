// What the layers of a model keep: rows in pages, rows in a ring, or a state.
#pragma once

#include <kvzap/core/cache.hpp>
#include <kvzap/core/head_partition.hpp>
#include <kvzap/model/model_config.hpp>
#include <utility>
#include <vector>

namespace kvzap::model {

/// Returns the rings of the layers whose attention does not see all tokens; empty if there are
/// none. A query and window - 1 older rows fill a window.
std::vector<OwnRing> own_rings(const ModelConfig& config);

/// Returns the heads of a layer's state on all ranks, and the values of each; 0 and 0 without a
/// state. Heads are key heads of a delta net, with their value heads, heads of a state space, or
/// channels of a short convolution.
std::pair<std::int64_t, std::int64_t> state_of(const ModelConfig& config, const LayerConfig& layer);

/// Returns the states of a rank's layers; empty if all layers have rows alone. The heads of a state
/// are dealt to the ranks (HeadPartition::state_heads).
std::vector<StateShape> states(const ModelConfig& config, const HeadPartition& partition, int rank);

/// Returns the extents of a rank's cache.
CacheShape cache_shape(const ModelConfig& config, const HeadPartition& partition, int rank,
                       int window, int page_rows);

/// Returns how a cache of this model stores rows in a format that a user has chosen. Throws Error
/// if the format has two types, and the model stores one vector for key and value.
PageFormat stored_format(const ModelConfig& config, const PageFormat& format);

/// Returns the number of layers that see all tokens.
std::int64_t full_layers(const ModelConfig& config);

/// Throws Error for a model without such layers, which nothing can prune.
void require_full_layers(const ModelConfig& config);

}  // namespace kvzap::model
