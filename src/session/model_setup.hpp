// Prepares a model folder for a number of ranks: layers, assignment of heads, weights.
#pragma once

#include <kvzap/core/communicator.hpp>
#include <kvzap/core/head_partition.hpp>
#include <kvzap/engine/pruning.hpp>
#include <kvzap/engine/sampler.hpp>
#include <kvzap/engine/surrogate.hpp>
#include <kvzap/model/model.hpp>
#include <kvzap/model/model_config.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvzap::session {

/// A model, or its first layers, with its heads assigned to ranks.
struct ModelSetup {
  std::string folder;
  /// num_hidden_layers counts the layers in use.
  ModelConfig config;
  HeadPartition partition;
  /// Layers that config.json declares.
  std::int64_t all_layers;
  /// Equals `partition` in the layers in use.
  HeadPartition partition_of_all_layers;

  bool is_truncated() const { return config.num_hidden_layers < all_layers; }
  /// Returns the config with all layers, because files of policies and surrogates belong to the
  /// whole model.
  ModelConfig whole_config() const;
};

/// Assigns the KV heads of the model's first `layers` layers to ranks: evenly, or balanced by the
/// rows that each head kept in an earlier run. `kept`: [layer][KV head]; empty: evenly. `config`
/// has all layers; `layers` is 1 to their number. Throws Error as HeadPartition does.
ModelSetup deal_model(const std::string& folder, ModelConfig config, std::int64_t layers,
                      std::vector<std::vector<std::int64_t>> kept, int ranks);

/// Loads this rank's part of a surrogate of the whole model. Only the first layers are used. Does
/// not communicate.
std::shared_ptr<Surrogate> load_surrogate(const std::string& folder, const ModelSetup& setup,
                                          DType dtype, const Communicator& comm);

/// Replaces the RoPE scaling of `config`: `scaling` is "none", or "linear", "dynamic" or "yarn" by
/// a factor; empty: nothing changes. Throws Error for other names, and as rope_scaling_by_factor
/// does.
void scale_rope(ModelConfig& config, const std::string& scaling, double factor);

/// Calls kvzap::load for this model. Does not communicate.
LoadedPruning load_policy(const Pruning& pruning, const ModelSetup& setup, DType dtype,
                          const Communicator& comm, const std::optional<RepeatPrompt>& repeat = {},
                          const PruningNames& names = plain_names());

/// The options with the rules of the model's generation_config.json: repetition_penalty,
/// suppress_tokens and bad_words.
SamplingOptions with_rules(SamplingOptions sampling, const GenerationConfig& rules);

/// Returns the rows of the ring for sequences of at most `longest` tokens. A longer ring would only
/// waste memory, because no pair would ever leave it.
int ring_rows(int window, std::int64_t longest);

/// Loads this rank's share of the weights. Collective.
std::shared_ptr<const Model> load_model(const ModelSetup& setup, DType dtype,
                                        std::optional<std::uint64_t> random_weights,
                                        WeightStorage storage, const Communicator& comm,
                                        const ProgressCallback& progress);

}  // namespace kvzap::session
