// The maps of latent attention on either side of attention over the cache's rows.
#pragma once

#include "engine/step.hpp"

namespace kvzap::engine {

/// Absorbs the maps from latents to keys and values into queries and outputs (DeepSeek-V2, arXiv
/// 2405.04434, section 2.1.2), for a rank's query heads.
class LatentMaps {
 public:
  /// Reserves the memory of a step for all layers.
  void reserve(const Step& step);
  /// Writes queries (row, query head * head_dim), then the key of the row if `computed` has room
  /// for it, all before RoPE, in the engine's order of dimensions. x (row, hidden_size).
  void project(Step& step, int layer, const linalg::Matrix& x, const linalg::Matrix& computed);
  /// Returns the values (row, query head * value_dim) of attended rows (row, query head *
  /// head_dim).
  linalg::Matrix expand(Step& step, int layer, const linalg::Matrix& attended);
  void release();

 private:
  linalg::Vector m_query_latents, m_queries, m_row_latents, m_values, m_head_gates;
};

/// W_O of query heads with the maps from latents to values absorbed.
class LatentOutputWeights {
 public:
  /// y (head_dim, hidden_size): of this rank's query head `head`; 0 for RoPE's dimensions.
  void of_head(const ExecutionSpace& exec, const Model::Weights::Layer& weights, std::int64_t head,
               const linalg::Matrix& y);
  /// y (query head * head_dim, hidden_size): of all of this rank's.
  void of_all(const ExecutionSpace& exec, const Model::Weights::Layer& weights,
              const linalg::Matrix& y);

 private:
  linalg::Vector m_outputs, m_from_value;
};

/// Sets the dimensions of latent rows (row, head_dim) that RoPE rotates to 0. What is left is the
/// latent, which is the row's value.
void clear_rotated(const ExecutionSpace& exec, const ModelConfig& config,
                   const linalg::Matrix& rows);

}  // namespace kvzap::engine
