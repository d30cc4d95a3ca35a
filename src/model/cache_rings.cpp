#include "model/cache_rings.hpp"

namespace kvzap::model {

std::vector<OwnRing> own_rings(const ModelConfig& config) {
  std::vector<OwnRing> rings;
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
    const LayerConfig layer = config.layer(l);
    OwnRing ring;
    if (!config.is_full(l)) {
      // Both are at most 2^31 - 1, as config.json's sizes are.
      ring.rows = static_cast<int>(layer.chunk > 0 ? layer.chunk : layer.window - 1);
      ring.restarts = layer.chunk > 0;
    }
    rings.push_back(ring);
  }
  if (full_layers(config) == config.num_hidden_layers) rings.clear();
  return rings;
}

std::int64_t full_layers(const ModelConfig& config) {
  std::int64_t count = 0;
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) count += config.is_full(l) ? 1 : 0;
  return count;
}

void require_full_layers(const ModelConfig& config) {
  if (full_layers(config) > 0) return;
  throw Error(
      "nothing can be pruned: every layer of the model has a window or chunks, and keeps only what "
      "they show");
}

}  // namespace kvzap::model
