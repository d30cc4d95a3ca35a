// Which rank owns which KV head, layer by layer.
#pragma once

#include <kvzap/core/types.hpp>
#include <utility>
#include <vector>

namespace kvzap {

/// Half-open range of `total` items that part `part` of `parts` owns when they are dealt evenly and
/// in order; the first parts get the remainder.
std::pair<std::int64_t, std::int64_t> even_range(std::int64_t total, int parts, int part);

/// KV heads (each with its query group) dealt to ranks. Every rank owns at least one head of every
/// layer; within a rank heads are in ascending order.
class HeadPartition {
 public:
  /// Contiguous runs of heads, equal up to one. Throws Error if n_ranks > n_kv_heads.
  static HeadPartition even(int n_layers, int n_kv_heads, int n_ranks);

  /// Longest first to the rank with the least rows so far, per layer, so that a layer's longest
  /// rank is as short as this greedy rule makes it. kept[layer][head]: rows kept in an earlier run.
  /// Throws Error on ragged or negative input, or if n_ranks > the number of heads.
  static HeadPartition balanced(const std::vector<std::vector<std::int64_t>>& kept, int n_ranks);

  int n_layers() const { return static_cast<int>(m_heads.size()); }
  int n_ranks() const { return m_n_ranks; }
  int n_kv_heads() const { return m_n_kv_heads; }
  /// Global indices of the heads of `layer` on `rank`, ascending.
  const std::vector<int>& heads(int layer, int rank) const { return m_heads[layer][rank]; }

 private:
  HeadPartition(int n_layers, int n_kv_heads, int n_ranks);
  int m_n_kv_heads;
  int m_n_ranks;
  std::vector<std::vector<std::vector<int>>> m_heads;
};

}  // namespace kvzap
