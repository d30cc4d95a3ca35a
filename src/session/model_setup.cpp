#include "session/model_setup.hpp"

#include <algorithm>
#include <utility>

namespace kvzap::detail {

ModelSetup deal_model(const std::string& folder, ModelConfig config, std::int64_t layers,
                      std::vector<std::vector<std::int64_t>> kept, int ranks) {
  const std::int64_t all_layers = config.num_hidden_layers;
  config.num_hidden_layers = layers;
  const auto even = [&](std::int64_t count) {
    return HeadPartition::even(static_cast<int>(count),
                               static_cast<int>(config.num_key_value_heads), ranks);
  };
  if (kept.empty()) return {folder, config, even(layers), all_layers, even(all_layers)};
  HeadPartition partition = HeadPartition::balanced(kept, ranks);
  kept.resize(all_layers, kept.back());
  return {folder, config, std::move(partition), all_layers, HeadPartition::balanced(kept, ranks)};
}

std::shared_ptr<Surrogate> load_surrogate(const std::string& folder, const ModelSetup& setup,
                                          DType dtype, const Communicator& comm) {
  ModelConfig whole = setup.config;
  whole.num_hidden_layers = setup.all_layers;
  return std::make_shared<Surrogate>(
      Surrogate::load(folder, whole, setup.partition_of_all_layers, comm.rank(), dtype, comm));
}

CacheOptions cache_options(const Pruning& pruning) {
  CacheOptions cache;
  cache.prune = pruning.mode_in_force();
  cache.prefill = pruning.prefill;
  cache.chunk = pruning.chunk;
  cache.threshold = static_cast<float>(pruning.amount.threshold.value_or(0));
  cache.window = pruning.window;
  cache.sink = pruning.sink;
  cache.prune_after = pruning.moment;
  cache.decode_every = pruning.decode.every;
  cache.decode_keep = pruning.decode.keep.value_or(0);
  cache.decode_evict_ratio = pruning.decode.evict_ratio.value_or(0);
  return cache;
}

int ring_rows(int window, std::int64_t longest) {
  constexpr std::int64_t small_ring = 1024;
  return static_cast<int>(std::min<std::int64_t>(window, std::max(small_ring, longest)));
}

}  // namespace kvzap::detail
