#include "model/cache_layers.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace kvzap::model {

std::vector<OwnRing> own_rings(const ModelConfig& config) {
  std::vector<OwnRing> rings;
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
    const LayerConfig layer = config.layer(l);
    OwnRing ring;
    if (layer.rows_of >= 0) {
      ring = {1, true};  // always empty
    } else if (!config.is_full(l) && !layer.has_delta_net) {
      // Both are at most 2^31 - 1, as config.json's sizes are.
      ring.rows = static_cast<int>(layer.chunk > 0 ? layer.chunk : layer.window - 1);
      ring.restarts = layer.chunk > 0;
    }
    ring.head_dim = static_cast<int>(layer.head_dim);  // of a ring alone
    rings.push_back(ring);
  }
  const bool has_any =
      std::any_of(rings.begin(), rings.end(), [](const OwnRing& ring) { return ring.rows > 0; });
  return has_any ? rings : std::vector<OwnRing>();
}

std::vector<StateShape> states(const ModelConfig& config, const HeadPartition& partition,
                               int rank) {
  std::vector<StateShape> states;
  if (!config.delta_net) return states;
  const DeltaNetConfig& net = *config.delta_net;
  for (int l = 0; l < static_cast<int>(config.num_hidden_layers); ++l) {
    StateShape state;
    if (config.layer(l).has_delta_net) {
      // At most the net's key heads, which config.json's bounds limit.
      state.heads = static_cast<int>(partition.count_state_heads(l, rank, net.key_heads));
      state.values = net.state_values();
    }
    states.push_back(state);
  }
  return states;
}

CacheShape cache_shape(const ModelConfig& config, const HeadPartition& partition, int rank,
                       int window, int page_rows) {
  CacheShape shape;
  for (int l = 0; l < partition.n_layers(); ++l) {
    shape.heads.push_back(static_cast<int>(partition.heads(l, rank).size()) *
                          static_cast<int>(config.layer(l).kv_heads_factor));
  }
  shape.head_dim = static_cast<int>(config.head_dim);
  shape.window = window;
  shape.page_rows = page_rows;
  shape.own_rings = own_rings(config);
  shape.states = states(config, partition, rank);
  shape.format = stored_format(config, {});
  return shape;
}

PageFormat stored_format(const ModelConfig& config, const PageFormat& format) {
  PageFormat stored = format;
  stored.values_are_keys = config.row_vectors() == 1;
  if (stored.values_are_keys && stored.keys != stored.values) {
    throw Error(fmt::format(
        "rows of type {} and {}: a model with latent attention stores one vector for a token's key "
        "and value; expected one type, such as {}",
        name_of(format.keys), name_of(format.values), name_of(format.keys)));
  }
  return stored;
}

std::int64_t full_layers(const ModelConfig& config) {
  std::int64_t count = 0;
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) count += config.is_full(l) ? 1 : 0;
  return count;
}

void require_full_layers(const ModelConfig& config) {
  if (full_layers(config) > 0) return;
  throw Error("nothing can be pruned: no layer of the model has attention to all tokens");
}

}  // namespace kvzap::model
