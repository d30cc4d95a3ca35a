// The number and choice of the rows that stay: the second of the three parts of an eviction policy.
#pragma once

#include <cstdint>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/types.hpp>
#include <memory>
#include <string>
#include <vector>

namespace kvzap {

/// Scores of one layer's heads on this rank, and the view for the verdict on each row.
struct ScoredLayer {
  int layer = 0;
  /// (head on this rank): index of each head in the model.
  std::vector<int> heads;
  /// (head on this rank): number of rows of each head.
  std::vector<std::int64_t> rows;
  /// (head on this rank, row): scores, rows by position.
  Kokkos::View<const float**, Kokkos::LayoutStride, MemorySpace> scores;
  /// (head on this rank, row): 1 where the row stays. Same extents as the scores.
  Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, MemorySpace> keep;
};

/// The share of its rows that each head loses ("per-head", LU-KV, arXiv 2602.08585).
struct HeadRatios {
  /// Tables of a curve: for the evict ratios 0.01 … 0.99 of the model.
  static constexpr int curve_tables = 99;

  int layers = 0;  // of the model
  int heads = 0;   // KV heads of a layer
  /// (table, layer, head): evict ratios in [0, 1]. There is one table, or curve_tables.
  std::vector<float> ratios;
  /// First and last rows of each head. They stay before all its other rows.
  std::int64_t sink = 0, window = 0;

  bool is_curve() const {
    return ratios.size() > static_cast<std::size_t>(layers) * static_cast<std::size_t>(heads);
  }
  /// Returns the ratios (head) of a layer. A curve's table is the one for round(100 evict_ratio),
  /// halves to even; a curve evicts nothing if `evict_ratio` is 0.
  std::vector<float> of_layer(double evict_ratio, int layer) const;
  /// Returns the rows (head) that stay of `tokens`. Rounds as kvpress' LUKVPress: the heads keep
  /// the rounded sum of their shares together, and the largest fractions round up; each head keeps
  /// at least one row.
  std::vector<std::int64_t> rows(double evict_ratio, int layer, std::int64_t tokens) const;
};

/// The number of rows that stay: the best rows of a pool. Counts follow kvpress: a head of n tokens
/// keeps max(1, floor(n (1 - evict_ratio))).
struct Budget {
  /// The set of rows that compete with each other.
  enum class Pool {
    head,   // rows of one head: every head keeps the same number
    layer,  // rows of all heads of a layer ("ada", arXiv 2407.11550)
    model   // rows of all layers ("global")
  };
  /// The unit of the amount. `none`: there is no budget, and a threshold decides.
  enum class Amount { none, evict_ratio, keep_tokens, bytes };

  Amount amount = Amount::none;
  double evict_ratio = 0;        // of the tokens that the sequence has seen
  std::int64_t keep_tokens = 0;  // rows per head
  std::int64_t bytes = 0;        // of keys and values, over all layers and ranks
  Pool pool = Pool::head;
  /// Pool::layer, Pool::model: every head keeps at least this fraction of the rows that Pool::head
  /// would keep for it, and at least one row if the fraction is not 0.
  double safeguard = 0.2;
  /// Pool::layer, Pool::model: the evict ratio counts the pool's rows, and floor(rows * ratio) are
  /// evicted (kvpress' KVzip and FastKVzip). Otherwise the pool keeps heads times the rows that one
  /// head would keep (kvpress' AdaKV).
  bool counts_pools = false;
  /// Evict ratio of each layer; empty: the same for all layers ("per-layer").
  std::vector<double> layer_ratios;
  /// Evict ratios of each head; null: heads do not differ. Needs Amount::evict_ratio, Pool::head
  /// and none of the fields below.
  std::shared_ptr<const HeadRatios> head_ratios;
  /// Pool::model: the best rows of all heads of a layer compete as one, then the second best, and
  /// so on, so that these heads keep the same number (KVCompose, arXiv 2509.05165). See
  /// policy::composite_rows.
  bool is_composite = false;
  /// Whether the budget decreases with depth ("pyramid", arXiv 2406.02069), from 1 - 1/beta above
  /// the mean to the same amount below it. The decrease excludes `pyramid_window` rows.
  bool pyramid = false;
  std::int64_t pyramid_window = 64;
  double pyramid_beta = 20;
  /// Rows of one part of the sequence, each with its own budget (kvpress' ChunkPress); 0: no parts.
  std::int64_t chunk = 0;
  /// Rows that stay or are evicted together, in all heads of a layer (ChunkKV, arXiv 2502.00299);
  /// 0: no groups.
  std::int64_t group = 0;
  /// Rows that stay of a group with a large score that is due to few of its rows; other groups get
  /// the rows in its place (kvpress' EntropyGatedChunkKVPress). 0: groups are not divided.
  std::int64_t spiky = 0;

  /// The sizes of the model on which counts depend.
  struct Model {
    int layers = 1;              // that are pruned
    int kv_heads = 1;            // of one layer, over all ranks
    std::int64_t row_bytes = 1;  // key and value of one row of one head
    /// Numbers of the layers that are pruned, ascending; empty: 0 … layers - 1.
    std::vector<int> pruned = {};

    /// Returns how many pruned layers precede `layer`.
    int place_of(int layer) const;
    /// Returns the number of the pruned layer that `place` others precede.
    int layer_at(int place) const {
      return pruned.empty() ? place : pruned[static_cast<std::size_t>(place)];
    }
  };

  bool has_amount() const { return amount != Amount::none; }
  /// Returns "evict ratio 0.5", "1024 tokens", "1000000 bytes" or "own".
  std::string text() const;
  /// Returns whether the rows of a layer can be chosen without the scores of other layers.
  bool by_layer() const { return pool != Pool::model; }
  /// Returns the evict ratio of a layer, of its heads the mean. Needs Amount::evict_ratio.
  double ratio_of(int layer) const;
  /// Returns the rows that a head of `layer` keeps when its sequence has seen `tokens` tokens; at
  /// most `tokens`. Where heads differ this is the mean over heads, rounded down. Throws Error
  /// that names the smallest possible budget if this one is smaller.
  std::int64_t rows_per_head(const Model& model, int layer, std::int64_t tokens) const;
  /// Returns the number of rows that stay of the rows [begin, end) of a head with `rows` rows. This
  /// range is one part of the sequence, see `chunk`.
  std::int64_t rows_of_part(const Model& model, int layer, std::int64_t tokens, std::int64_t rows,
                            std::int64_t begin, std::int64_t end) const;
  /// Returns how many rows the safeguard keeps in a head that would keep `rows` without
  /// competition.
  std::int64_t safe_rows(std::int64_t rows) const;

  /// Chooses the rows that stay: fills `keep` of all layers. `layers` are any number of layers if
  /// by_layer(), else all layers of the model. `tokens`: tokens that the sequence has seen.
  ///
  /// The choice is exact, in the order of (score, head, position); of equal scores the oldest stay.
  /// It is the same for any number of ranks and any placement of heads. Scores that are NaN or
  /// infinite stay, even beyond the budget. A head or pool with fewer rows than the budget keeps
  /// them all; this happens when earlier steps have evicted rows. Columns of `keep` after a head's
  /// rows are not written.
  ///
  /// Collective, with the same layers on every rank. If heads do not compete (Pool::head without
  /// `group`), it communicates nothing. Waits for `exec`. Allocates. Throws Error if the budget is
  /// smaller than the smallest possible one, or if parts of it contradict each other.
  void choose(const ExecutionSpace& exec, const Communicator& comm, const Model& model,
              std::int64_t tokens, const std::vector<ScoredLayer>& layers) const;
};

}  // namespace kvzap
