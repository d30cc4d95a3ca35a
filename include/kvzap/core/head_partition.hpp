// The assignment of KV heads to ranks, layer by layer.
#pragma once

#include <kvzap/core/types.hpp>
#include <utility>
#include <vector>

namespace kvzap {

/// Returns the half-open range of `total` items that part `part` of `parts` owns. Items are
/// distributed evenly and in order; the first parts get the remainder.
std::pair<std::int64_t, std::int64_t> even_range(std::int64_t total, int parts, int part);

/// Returns the heads of a layer's state (StateShape) that belong to a KV head: snapshots deal the
/// state's heads evenly to the KV heads, in order.
inline std::pair<std::int64_t, std::int64_t> state_heads_of(std::int64_t state_heads,
                                                            std::int64_t kv_heads, int kv_head) {
  return even_range(state_heads, static_cast<int>(kv_heads), kv_head);
}

/// Half-open ranges of indices, ascending.
using IndexRanges = std::vector<std::pair<std::int64_t, std::int64_t>>;

/// An assignment of KV heads, each with its query group, to ranks. With up to as many ranks as KV
/// heads every rank owns at least one head of every layer; with more, some own none. Within a rank,
/// heads are in ascending order. The owner of a head judges its rows and keeps its ring; pages of
/// its rows may lie on other ranks.
class HeadPartition {
 public:
  /// Returns contiguous runs of heads whose lengths differ by at most one. With more ranks than
  /// heads, the ranks that own a head are spread evenly.
  static HeadPartition even(int n_layers, int n_kv_heads, int n_ranks);

  /// Returns a partition that balances the kept rows of each layer. Per layer, heads are assigned
  /// in descending order of length, each to the rank with the fewest rows so far.
  /// kept[layer][head]: rows kept in an earlier run. Throws Error on ragged or negative input.
  static HeadPartition balanced(const std::vector<std::vector<std::int64_t>>& kept, int n_ranks);

  /// Returns whether the weights of q, k, v and o are dealt evenly to the ranks, whoever owns the
  /// heads: with more ranks than KV heads. Otherwise they follow the heads.
  bool deals_projections() const { return m_n_ranks > m_n_kv_heads; }
  /// Returns the outputs of q, k and v that `rank` computes, in the order in which it has them.
  /// They are counted over all query heads, then the keys of all KV heads, then the values.
  /// kv_dim: dimensions of a KV head's key; 0: the layer has no keys and values of its own.
  IndexRanges projected(int layer, int rank, std::int64_t group, std::int64_t head_dim,
                        std::int64_t kv_dim) const;
  /// The same with keys of head_dim.
  IndexRanges projected(int layer, int rank, std::int64_t group, std::int64_t head_dim) const {
    return projected(layer, rank, group, head_dim, head_dim);
  }
  /// Returns the inputs of o that `rank` multiplies, counted over all query heads.
  IndexRanges attended(int layer, int rank, std::int64_t group, std::int64_t head_dim) const;
  /// Returns the half-open range of query heads, of `query_heads` of the only KV head, whose maps
  /// `rank` has with latent attention: all on one rank, or an even share.
  std::pair<std::int64_t, std::int64_t> latent_heads(int rank, std::int64_t query_heads) const {
    return even_range(query_heads, m_n_ranks, rank);
  }

  /// Returns the heads of a layer's state (StateShape), of `state_heads` on all ranks, that `rank`
  /// has: those of its KV heads (state_heads_of), or with more ranks than KV heads an even share.
  IndexRanges state_heads(int layer, int rank, std::int64_t state_heads) const;
  /// Returns their number.
  std::int64_t count_state_heads(int layer, int rank, std::int64_t state_heads) const;

  int n_layers() const { return static_cast<int>(m_heads.size()); }
  int n_ranks() const { return m_n_ranks; }
  int n_kv_heads() const { return m_n_kv_heads; }
  /// Returns the global indices of the heads of `layer` on `rank`, ascending.
  const std::vector<int>& heads(int layer, int rank) const { return m_heads[layer][rank]; }

 private:
  HeadPartition(int n_layers, int n_kv_heads, int n_ranks);
  int m_n_kv_heads;
  int m_n_ranks;
  std::vector<std::vector<std::vector<int>>> m_heads;
};

}  // namespace kvzap
