// KVzap's surrogate: predicts from the hidden state that enters attention how much each KV head's
// pair at that position will matter.
#pragma once

#include <filesystem>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/head_partition.hpp>
#include <kvzap/engine/scorer.hpp>
#include <kvzap/model/model_config.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvzap {

/// One linear map, or one 2-layer MLP with exact GELU, per layer of the model (arXiv 2601.07891,
/// section 3). A linear map's outputs are split over ranks as the KV heads are; of an MLP each rank
/// has an equal part of the hidden units, and the partial scores are summed over ranks.
class Surrogate final : public Scorer {
 public:
  /// Reads a folder as published (nvidia/KVzap-linear-…, nvidia/KVzap-mlp-…): config.json with
  /// input_dim, output_dim, hidden_dim (null: linear) and n_modules; tensors layers.N.weight|bias,
  /// or layers.N.0.* and layers.N.2.*. Throws Error if it does not fit the model, naming both.
  ///
  /// dtype: how the weights are held; with bf16, inputs of the products are rounded to bf16 too.
  /// ranks: those of the partition, which then share an MLP's hidden layer, and all call score
  /// together; without it, this rank computes the hidden layer whole.
  static Surrogate load(const std::filesystem::path& folder, const ModelConfig& model,
                        const HeadPartition& partition, int rank, DType dtype = DType::f32,
                        std::optional<Communicator> ranks = std::nullopt);
  Surrogate(Surrogate&&) noexcept;
  Surrogate& operator=(Surrogate&&) noexcept;
  ~Surrogate() override;

  /// scores (head on this rank, token) = predicted log KVzip+ scores of M tokens of a layer.
  /// hidden: (M, hidden_size), the output of the layer's input norm.
  void score(const ExecutionSpace& exec, int layer, const PositionView& positions,
             const InputView& hidden, const ScoreView& scores) override;

  void reserve(std::int64_t tokens) override;

  /// "linear" or "mlp".
  std::string kind() const override;

  struct Layers;  // by value type

 private:
  explicit Surrogate(std::unique_ptr<Layers> layers);
  std::unique_ptr<Layers> m_layers;
};

}  // namespace kvzap
