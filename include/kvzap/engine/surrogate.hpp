// KVzap's surrogate: it predicts the importance of each KV head's pair from the hidden state that
// enters attention.
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

/// One linear map, or one 2-layer MLP with exact GELU, for each layer of the model (arXiv
/// 2601.07891, section 3). The outputs of a linear map are split over ranks like the KV heads. Each
/// rank has an equal part of the hidden units of an MLP, and the partial scores are summed over
/// ranks.
class Surrogate final : public Scorer {
 public:
  /// Reads a published folder (nvidia/KVzap-linear-…, nvidia/KVzap-mlp-…): config.json with
  /// input_dim, output_dim, hidden_dim (null: linear) and n_modules, and tensors
  /// layers.N.weight|bias, or layers.N.0.* and layers.N.2.*. Throws Error that names both models if
  /// the surrogate does not fit the model.
  ///
  /// dtype: value type of the weights in memory. With bf16, inputs of the products are rounded to
  /// bf16 too.
  /// ranks: the ranks of the partition. They share the hidden layer of an MLP, and all must call
  /// score together. If absent, this rank computes the whole hidden layer.
  static Surrogate load(const std::filesystem::path& folder, const ModelConfig& model,
                        const HeadPartition& partition, int rank, DType dtype = DType::f32,
                        std::optional<Communicator> ranks = std::nullopt);
  Surrogate(Surrogate&&) noexcept;
  Surrogate& operator=(Surrogate&&) noexcept;
  ~Surrogate() override;

  /// Fills scores (head on this rank, token) with the predicted log KVzip+ scores of M tokens of a
  /// layer. hidden: (M, hidden_size), the output of the layer's input norm. Collective if the
  /// surrogate is an MLP that several ranks share.
  void score(const ExecutionSpace& exec, int layer, const PositionView& positions,
             const InputView& hidden, const ScoreView& scores) override;

  void reserve(std::int64_t tokens) override;
  bool is_repeatable() const override { return true; }

  /// Returns "linear" or "mlp".
  std::string kind() const override;

  struct Layers;

 private:
  explicit Surrogate(std::unique_ptr<Layers> layers);
  std::unique_ptr<Layers> m_layers;
};

}  // namespace kvzap
