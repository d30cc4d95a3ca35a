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
    } else if (!config.is_full(l) && layer.has_attention()) {
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

std::pair<std::int64_t, std::int64_t> state_of(const ModelConfig& config,
                                               const LayerConfig& layer) {
  switch (layer.mixing) {
    case TokenMixing::attention:
    case TokenMixing::none:
      return {0, 0};
    case TokenMixing::delta_net:
      return {config.delta_net->key_heads, config.delta_net->state_values()};
    case TokenMixing::short_convolution:
      return {config.hidden_size, config.short_convolution->state_values()};
    case TokenMixing::state_space:
    case TokenMixing::attention_and_state_space:
    case TokenMixing::attention_into_state_space:
      return {config.state_space->heads, config.state_space->state_values()};
  }
  return {0, 0};
}

std::vector<StateShape> states(const ModelConfig& config, const HeadPartition& partition,
                               int rank) {
  std::vector<StateShape> states;
  bool has_any = false;
  for (int l = 0; l < static_cast<int>(config.num_hidden_layers); ++l) {
    const LayerConfig layer = config.layer(l);
    const auto [heads, values] = state_of(config, layer);
    StateShape state;
    // config.json's bounds limit the heads.
    state.heads = static_cast<int>(partition.count_state_heads(l, rank, heads));
    state.values = values;
    state.is_beside_rows = values > 0 && layer.has_attention();
    state.keeps_nothing = layer.mixing == TokenMixing::none;
    has_any = has_any || values > 0 || state.keeps_nothing;
    states.push_back(state);
  }
  return has_any ? states : std::vector<StateShape>();
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
