#include "session/model_setup.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace kvzap::session {

ModelConfig ModelSetup::whole_config() const {
  ModelConfig whole = config;
  whole.num_hidden_layers = all_layers;
  return whole;
}

ModelSetup deal_model(const std::string& folder, ModelConfig config, std::int64_t layers,
                      std::vector<std::vector<std::int64_t>> kept, int ranks) {
  const std::int64_t all_layers = config.num_hidden_layers;
  config.num_hidden_layers = layers;
  const auto even = [&](std::int64_t count) {
    return HeadPartition::even(static_cast<int>(count),
                               static_cast<int>(config.num_key_value_heads), ranks);
  };
  if (kept.empty()) return {folder, config, even(layers), all_layers, even(all_layers)};
  // A layer that reads another one's rows has them where its owner has.
  for (std::size_t l = 0; l < kept.size(); ++l) {
    kept[l] = kept[static_cast<std::size_t>(config.rows_of(static_cast<std::int64_t>(l)))];
  }
  HeadPartition partition = HeadPartition::balanced(kept, ranks);
  kept.resize(all_layers, kept.back());
  return {folder, config, std::move(partition), all_layers, HeadPartition::balanced(kept, ranks)};
}

std::shared_ptr<Surrogate> load_surrogate(const std::string& folder, const ModelSetup& setup,
                                          DType dtype, const Communicator& comm) {
  return std::make_shared<Surrogate>(Surrogate::load(
      folder, setup.whole_config(), setup.partition_of_all_layers, comm.rank(), dtype, comm));
}

std::shared_ptr<const Model> load_model(const ModelSetup& setup, DType dtype,
                                        std::optional<std::uint64_t> random_weights,
                                        WeightStorage storage, const Communicator& comm,
                                        const ProgressCallback& progress) {
  std::shared_ptr<const Model> model;
  comm.agree([&] {
    model = std::make_shared<const Model>(Model::load(setup.folder, setup.config, dtype,
                                                      setup.partition, comm.rank(),
                                                      {random_weights, storage, progress}));
  });
  return model;
}

void scale_rope(ModelConfig& config, const std::string& scaling, double factor) {
  if (scaling.empty()) return;
  if (scaling == "none") return config.rope_scaling.reset();
  const auto& layers = config.layers;
  if (!layers.empty() &&
      std::none_of(layers.begin(), layers.end(), [](const auto& l) { return l.has_rope; })) {
    throw Error(
        fmt::format("rope_scaling is {}; expected none: no layer of the model has RoPE", scaling));
  }
  for (const RopeType type : {RopeType::linear, RopeType::dynamic, RopeType::yarn}) {
    if (scaling != name_of(type)) continue;
    config.rope_scaling = rope_scaling_by_factor(config, type, factor);
    return;
  }
  throw Error(fmt::format("rope_scaling is {}; expected none, linear, dynamic or yarn", scaling));
}

LoadedPruning load_policy(const Pruning& pruning, const ModelSetup& setup, DType dtype,
                          const Communicator& comm, const std::optional<RepeatPrompt>& repeat,
                          const PruningNames& names) {
  const ModelConfig whole = setup.whole_config();
  const PolicySetup policy_setup{whole, setup.partition_of_all_layers, dtype, setup.folder,
                                 comm,  setup.config.num_hidden_layers};
  return load(pruning, policy_setup, repeat, names);
}

SamplingOptions with_rules(SamplingOptions sampling, const GenerationConfig& rules) {
  sampling.repetition_penalty = rules.repetition_penalty;
  sampling.suppress_tokens = rules.suppress_tokens;
  sampling.bad_words = rules.bad_words;
  return sampling;
}

int ring_rows(int window, std::int64_t longest) {
  constexpr std::int64_t small_ring = 1024;
  return static_cast<int>(std::min<std::int64_t>(window, std::max(small_ring, longest)));
}

}  // namespace kvzap::session
