// RoPE's angles, and factors of the queries, for the tokens of a step.
#pragma once

#include "engine/step.hpp"
#include "engine/step_kernels.hpp"

namespace kvzap::engine {

class RopeAngles {
 public:
  explicit RopeAngles(const ModelConfig& config);

  void reserve(const Step& step);
  /// Computes the angles and factors from the positions of the step's tokens, in float as
  /// transformers does.
  void fill(Step& step);
  void release();

  /// Returns the angles of a layer: (token, half of its heads' dimensions, 2).
  Angles of_layer(const ModelConfig& config, const LayerConfig& layer) const {
    return config.window_rope_theta && layer.window > 0 ? m_of_windows : m_angles;
  }
  /// Returns the factors of the queries, beside the 1 / sqrt(head_dim) of attention: (token), or
  /// empty.
  linalg::ConstVector query_scales(const ModelConfig& config, const LayerConfig& layer) const;
  /// Returns the inverse frequencies of texts up to the original length: (head_dim / 2).
  const linalg::Vector& inverse_frequencies() const { return m_frequencies; }

 private:
  void choose_tables(const Step& step);
  void scale_queries(const Step& step, std::int64_t head_dim, const linalg::Vector& of_tokens);

  using Buffer = Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace>;
  linalg::Vector m_frequencies;
  Buffer m_angles;
  // Of layers with a window, if their RoPE differs.
  linalg::Vector m_window_frequencies;
  Buffer m_of_windows;
  std::int64_t m_window_dim = 0;  // dimensions of these layers' heads, if they differ
  // If RoPE depends on the length of the text: tables of frequencies (table, head_dim / 2), the
  // first for texts up to the original length, and the table of each token (token).
  linalg::Matrix m_tables;
  Kokkos::View<std::int64_t*, MemorySpace> m_table_of;
  linalg::Vector m_query_scales;   // (token), if the model scales queries
  linalg::Vector m_window_scales;  // those of layers whose heads have other dimensions
};

}  // namespace kvzap::engine
