// How many rows stay, and which: the second of the three parts of an eviction policy.
#pragma once

#include <cstdint>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/types.hpp>
#include <string>
#include <vector>

namespace kvzap {

/// Scores of one layer's heads on this rank, and where to put the verdict on each row.
struct ScoredLayer {
  int layer = 0;
  /// (head on this rank): number of each in the model.
  std::vector<int> heads;
  /// (head on this rank): rows of each.
  std::vector<std::int64_t> rows;
  /// (head on this rank, row), rows by position.
  Kokkos::View<const float**, Kokkos::LayoutStride, MemorySpace> scores;
  /// (head on this rank, row): 1 where the row stays. Same extents as the scores.
  Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, MemorySpace> keep;
};

/// Which scores stay: the top share of a pool of rows. Counts follow kvpress: a head of n tokens
/// keeps max(1, floor(n (1 - evict_ratio))).
struct Budget {
  /// Rows that compete for the same places.
  enum class Pool {
    head,   // those of a head: every head keeps as many
    layer,  // those of all heads of a layer ("ada", arXiv 2407.11550)
    model   // those of all layers ("global")
  };
  /// What is given; none: no budget, a threshold decides.
  enum class Amount { none, evict_ratio, keep_tokens, bytes };

  Amount amount = Amount::none;
  double evict_ratio = 0;        // of the tokens that the sequence has seen
  std::int64_t keep_tokens = 0;  // rows per head
  std::int64_t bytes = 0;        // of keys and values, over all layers and ranks
  Pool pool = Pool::head;
  /// Pool::layer, Pool::model: every head keeps at least this share of what Pool::head would keep,
  /// and one row if the share is not 0.
  double safeguard = 0.2;
  /// Pool::layer, Pool::model: the evict ratio is of the pool's rows, of which floor(rows * ratio)
  /// go (kvpress' KVzip and FastKVzip), instead of heads times what a head would keep (its AdaKV).
  bool counts_pools = false;
  /// Evict ratio of each layer; empty: the same for all ("per-layer").
  std::vector<double> layer_ratios;
  /// Whether the budget falls with depth ("pyramid", arXiv 2406.02069), from 1 - 1/beta above the
  /// mean to as much below it; `window` rows are never part of the fall.
  bool pyramid = false;
  std::int64_t pyramid_window = 64;
  double pyramid_beta = 20;
  /// Rows of a part of the sequence that has a budget of its own (kvpress' ChunkPress); 0: whole.
  std::int64_t chunk = 0;
  /// Rows that stay or go together, in all heads of a layer (ChunkKV, arXiv 2502.00299); 0: each
  /// row by itself.
  std::int64_t group = 0;

  /// What counts are made of.
  struct Model {
    int layers = 1;
    int kv_heads = 1;            // of a layer, over all ranks
    std::int64_t row_bytes = 1;  // key and value of one row of one head
  };

  bool has_amount() const { return amount != Amount::none; }
  /// "evict ratio 0.5", "1024 tokens", "1000000 bytes", or "own".
  std::string text() const;
  /// Whether a layer's rows can be chosen without the others' scores.
  bool by_layer() const { return pool != Pool::model; }
  /// Rows that a head of `layer` keeps of the `tokens` that its sequence has seen (the mean over
  /// heads where they compete, rounded down); not more than that. Throws Error if the budget is
  /// below the least possible, naming it.
  std::int64_t rows_per_head(const Model& model, int layer, std::int64_t tokens) const;
  /// Of the rows [begin, end) of a head's `rows` (one part of them, see `chunk`), how many stay.
  std::int64_t rows_of_part(const Model& model, int layer, std::int64_t tokens, std::int64_t rows,
                            std::int64_t begin, std::int64_t end) const;
  /// Rows that stay in any case of a head that would keep `rows` if it had not to compete.
  std::int64_t safe_rows(std::int64_t rows) const;

  /// Fills `keep` of all layers: any number of them if by_layer(), else all of the model. Exact, by
  /// order of (score, head, position), the oldest of equal ones first; the same for any number of
  /// ranks and any placement of heads. Scores that are NaN or infinite stay, even beyond the
  /// budget. A head or pool that has fewer rows than the budget allows, since some of the
  /// sequence's went before, keeps them all. What stands behind a head's rows in `keep` is not
  /// written.
  ///
  /// Collective, with the same layers on every rank, unless heads do not compete (Pool::head
  /// without `group`): then nothing is communicated. Waits for `exec`. Throws Error if the budget
  /// is below the least possible or parts of it contradict each other.
  void choose(const ExecutionSpace& exec, const Communicator& comm, const Model& model,
              std::int64_t tokens, const std::vector<ScoredLayer>& layers) const;
};

}  // namespace kvzap
