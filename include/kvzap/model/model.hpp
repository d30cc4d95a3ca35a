// This rank's share of a decoder's weights.
#pragma once

#include <filesystem>
#include <functional>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/head_partition.hpp>
#include <kvzap/core/linear_weights.hpp>
#include <kvzap/model/model_config.hpp>
#include <optional>
#include <string_view>
#include <vector>

namespace kvzap {

/// Reports the progress of a long operation: its name, steps done, steps in total. May be empty.
using ProgressCallback = std::function<void(std::string_view, std::int64_t, std::int64_t)>;

/// Weights of one rank, split as in Megatron-LM (arXiv 1909.08053): q, k and v by rows (heads), o
/// by the matching columns, gate and up by rows, down by columns, embedding and output head by rows
/// of the vocabulary. Norms are replicated. All matrices are (outputs, inputs), as in
/// torch.nn.Linear. Those of the layers may be packed, and so may an output head that is not tied.
/// Maps of the same input form one matrix, so that a step computes one product for them.
template <class Value>
class Model {
 public:
  using Matrix = Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace>;
  using Linear = LinearWeights<Value>;
  using Vector = Kokkos::View<float*, MemorySpace>;

  /// This rank's part of one layer's weights.
  struct Layer {
    Vector input_norm, attention_norm;  // (hidden)
    // Outputs of q, then k, then v: ((query heads + 2 KV heads) * dim, hidden). Their biases, or
    // empty.
    Linear qkv;
    Vector qkv_bias;
    Linear o;               // (hidden, query heads * dim)
    Vector o_bias;          // on rank 0 alone: it is added once, before the sum over ranks
    Vector q_norm, k_norm;  // (dim), or empty
    Linear gate_up;         // (2 * intermediate, hidden): gate, then up
    Vector gate_up_bias;    // or empty
    Linear down;            // (hidden, intermediate)
    Vector down_bias;       // on rank 0 alone
  };

  /// Reads this rank's part of the *.safetensors in `folder`. If `random_seed` is given, generates
  /// random weights instead. Throws Error that names file and tensor.
  static Model load(const std::filesystem::path& folder, const ModelConfig& config,
                    const HeadPartition& partition, int rank,
                    std::optional<std::uint64_t> random_seed = std::nullopt,
                    const ProgressCallback& progress = {});

  const ModelConfig& config() const { return m_config; }
  const HeadPartition& partition() const { return m_partition; }
  int rank() const { return m_rank; }
  const Layer& layer(int index) const { return m_layers[index]; }
  const Vector& final_norm() const { return m_final_norm; }
  /// The rows first_token() .. first_token() + extent(0) - 1 of the vocabulary.
  const Matrix& embedding() const { return m_embedding; }
  const Linear& output_head() const { return m_output_head; }
  std::int64_t first_token() const { return m_first_token; }
  /// Returns the bytes of all weights above, padding of packed ones included. A tied output head
  /// counts once.
  std::size_t bytes() const;

 private:
  Model(const ModelConfig& config, const HeadPartition& partition, int rank)
      : m_config(config), m_partition(partition), m_rank(rank) {}

  ModelConfig m_config;
  HeadPartition m_partition;
  int m_rank;
  std::vector<Layer> m_layers;
  Vector m_final_norm;
  Matrix m_embedding;
  Linear m_output_head;
  std::int64_t m_first_token = 0;
};

}  // namespace kvzap
