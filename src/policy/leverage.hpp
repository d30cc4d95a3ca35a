// Approximate leverage scores of keys, for the policies leverage and compactor.
#pragma once

#include <kvzap/engine/policy.hpp>
#include <map>
#include <memory>
#include <vector>

#include "linalg/gemm.hpp"
#include "policy/row_math.hpp"
#include "policy/torch_random.hpp"

namespace kvzap::policy {

/// The Gaussian sketches of all layers. Policies of several sequences share them. Not thread-safe.
class Sketches {
 public:
  /// `dimension`: columns of a sketch.
  Sketches(std::int64_t dimension, std::uint32_t seed) : m_dimension(dimension), m_normals(seed) {}

  std::int64_t dimension() const { return m_dimension; }
  /// Returns (head on this rank)(dimension, head_dim): the transposed sketch of each head of a
  /// layer, with variance 1 / dimension. The numbers are those of torch.randn(1, KV heads,
  /// head_dim, dimension), drawn layer by layer after torch.manual_seed(seed). They do not depend
  /// on the heads of this rank.
  const std::vector<linalg::Matrix>& of_layer(const PolicyLayer::Extents& extents);

 private:
  struct OfLayer {
    std::vector<int> heads;
    std::vector<linalg::Matrix> sketches;
  };

  std::int64_t m_dimension;
  LayerNormals m_normals;
  std::map<int, OfLayer> m_layers;
};

/// Leverage of rows of keys before RoPE: diag(X (XᵀX + εI)⁻¹ Xᵀ), where X are the keys of a head
/// minus their mean, times a Gaussian sketch Φ (Chari and Van Durme: "Compactor", arXiv
/// 2507.08143).
class LeverageScores {
 public:
  explicit LeverageScores(std::shared_ptr<Sketches> sketches) : m_sketches(std::move(sketches)) {}

  /// Sets scores(head, row) of the parts; each part counts as all rows. Keys are rotated back by
  /// their positions. ε is 0.01. It grows tenfold while a Cholesky factorization fails in any head
  /// of the layer on any rank (kvpress gives up after five tries). Keys that are not finite give
  /// NaN. Collective; waits for the layer's exec.
  void operator()(PolicyLayer& layer, const std::vector<RowPart>& parts,
                  const Policy::ScoreView& scores);

 private:
  std::shared_ptr<Sketches> m_sketches;
  ColumnSums m_sums;
  Kokkos::View<double*, MemorySpace> m_partial;   // sums of slices of rows, and the mean
  Kokkos::View<float*, MemorySpace> m_turns;      // sines and cosines of coarse and fine positions
  Kokkos::View<float*, MemorySpace> m_keys;       // (row, head_dim): before RoPE, minus their mean
  Kokkos::View<float*, MemorySpace> m_projected;  // for all heads: (row, dimension)
  Kokkos::View<float*, MemorySpace> m_solved;     // (row, dimension)
  Kokkos::View<float*, MemorySpace> m_norms;      // (row)
};

}  // namespace kvzap::policy
