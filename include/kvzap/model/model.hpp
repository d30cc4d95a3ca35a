// This rank's share of a decoder's weights.
#pragma once

#include <filesystem>
#include <functional>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/head_partition.hpp>
#include <kvzap/model/model_config.hpp>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace kvzap {

/// Reports the progress of a long operation: its name, steps done, steps in total. May be empty.
using ProgressCallback = std::function<void(std::string_view, std::int64_t, std::int64_t)>;

/// How weights are kept in memory.
enum class WeightStorage {
  as_stored,  ///< quantised weights in their blocks, others in the model's value type
  unpacked,   ///< all in the value type
  q8,         ///< quantised at load: matrices of more bits become Q8_0
  q4          ///< the same, as the mixture Q4_K_M (see kvzap quantize)
};

/// Returns the storage named "stored", "unpacked", "q8" or "q4". Throws Error for any other text.
WeightStorage weight_storage_from_name(std::string_view name);
/// Returns that name.
std::string_view name_of(WeightStorage storage);

/// Returns the bytes of the weights that Model::load would keep on each of `ranks` ranks with an
/// even partition, without the padding of packed weights. Opens the model's files, but reads no
/// weights. Throws Error as load does.
std::vector<std::int64_t> weight_bytes(const std::filesystem::path& model,
                                       const ModelConfig& config, DType dtype, int ranks,
                                       std::optional<std::uint64_t> random_seed,
                                       WeightStorage storage);

/// Weights of one rank, split as in Megatron-LM (arXiv 1909.08053). q, k and v are split by rows
/// (heads), and o by the matching columns. gate and up are split by rows, down by columns,
/// embedding and output head by rows of the vocabulary. Norms are replicated. Copies share the
/// weights.
class Model {
 public:
  /// The weights in the layouts that the decoder multiplies; the type is internal.
  struct Weights;

  /// How `load` gets the weights.
  struct LoadOptions {
    /// Generates random weights instead of reading them.
    std::optional<std::uint64_t> random_seed = std::nullopt;
    WeightStorage storage = WeightStorage::as_stored;
    ProgressCallback progress = {};
  };
  /// Reads this rank's part of the *.safetensors in `folder` as values of type `dtype`. Throws
  /// Error that names file and tensor.
  static Model load(const std::filesystem::path& folder, const ModelConfig& config, DType dtype,
                    const HeadPartition& partition, int rank, const LoadOptions& options);
  static Model load(const std::filesystem::path& folder, const ModelConfig& config, DType dtype,
                    const HeadPartition& partition, int rank) {
    return load(folder, config, dtype, partition, rank, {});
  }

  /// Returns the shape of a model whose layers run outside of the library (Engine::begin_step).
  /// `dtype`: the type of its keys and values.
  static Model without_weights(const ModelConfig& config, DType dtype,
                               const HeadPartition& partition);

  const ModelConfig& config() const { return m_config; }
  /// Returns the type of weights, and of the keys and values of a cache.
  DType dtype() const { return m_dtype; }
  const HeadPartition& partition() const { return m_partition; }
  int rank() const { return m_rank; }
  const Weights& weights() const { return *m_weights; }
  /// Returns the bytes of all weights, padding of packed ones included. A tied output head counts
  /// once.
  std::size_t bytes() const;

 private:
  Model(const ModelConfig& config, DType dtype, const HeadPartition& partition, int rank,
        std::shared_ptr<const Weights> weights)
      : m_config(config),
        m_dtype(dtype),
        m_partition(partition),
        m_rank(rank),
        m_weights(std::move(weights)) {}

  ModelConfig m_config;
  DType m_dtype;
  HeadPartition m_partition;
  int m_rank;
  std::shared_ptr<const Weights> m_weights;
};

}  // namespace kvzap
