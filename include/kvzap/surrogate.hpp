// KVzap's surrogate: predicts from the hidden state that enters attention how much each KV head's
// pair at that position will matter.
#pragma once

#include <filesystem>
#include <kvzap/communicator.hpp>
#include <kvzap/head_partition.hpp>
#include <kvzap/model_config.hpp>
#include <kvzap/scorer.hpp>
#include <memory>
#include <string>
#include <vector>

namespace kvzap {

/// One linear map, or one 2-layer MLP with exact GELU, per layer of the model (arXiv 2601.07891,
/// section 3). A rank holds the outputs of its own KV heads, and the whole hidden layer.
class Surrogate final : public Scorer {
 public:
  /// Reads a folder as published (nvidia/KVzap-linear-…, nvidia/KVzap-mlp-…): config.json with
  /// input_dim, output_dim, hidden_dim (null: linear) and n_modules; tensors layers.N.weight|bias,
  /// or layers.N.0.* and layers.N.2.*. Throws Error if it does not fit the model, naming both.
  static Surrogate load(const std::filesystem::path& folder, const ModelConfig& model,
                        const HeadPartition& partition, int rank);

  /// scores (head on this rank, token) = predicted log KVzip+ scores of M tokens of a layer.
  /// hidden: (M, hidden_size), the output of the layer's input norm.
  void score(const ExecutionSpace& exec, int layer, std::int64_t first, const InputView& hidden,
             const ScoreView& scores) override;

  /// "linear" or "mlp".
  std::string kind() const override { return m_hidden_dim == 0 ? "linear" : "mlp"; }

 private:
  using Matrix = Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>;
  using Vector = Kokkos::View<float*, MemorySpace>;
  struct Layer {
    Matrix hidden_weight;  // (hidden_dim, input_dim), MLP only
    Vector hidden_bias;    // (hidden_dim), MLP only
    Matrix weight;         // (heads on this rank, hidden_dim or input_dim)
    Vector bias;           // (heads on this rank)
  };

  std::int64_t m_hidden_dim = 0;
  std::vector<Layer> m_layers;
  Vector m_hidden;  // scratch
  Vector m_output;  // scratch
};

}  // namespace kvzap
