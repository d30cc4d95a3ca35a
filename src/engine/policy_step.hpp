// The part of an eviction policy in a step of one sequence.
#pragma once

#include <kvzap/engine/budget.hpp>
#include <kvzap/engine/policy.hpp>
#include <kvzap/engine/snapshot.hpp>
#include <kvzap/engine/value_merger.hpp>
#include <vector>

#include "engine/attention_sums.hpp"

namespace kvzap::engine {

/// Queries of the newest tokens of one sequence. Stored for all layers from step to step, or, if no
/// later step needs them, only for the current layer.
class RecentQueries {
 public:
  /// `tokens`: number of newest tokens. query_heads: number of query heads of each layer on this
  /// rank.
  RecentQueries(std::int64_t tokens, const std::vector<int>& query_heads, int head_dim,
                bool every_layer);
  /// Returns a copy with its own memory, for a fork or a checkpoint.
  RecentQueries clone() const;

  std::int64_t capacity() const { return m_capacity; }
  /// Stores the queries of a block. If tokens are missing between it and the stored ones, the
  /// stored ones are discarded. If the block overlaps the stored ones, because a step is repeated,
  /// it replaces them.
  void take(const ExecutionSpace& exec, int layer, const TokenBlock& block);
  /// Returns the newest queries of a sequence of `tokens` tokens: all that were stored without a
  /// gap. Valid until the next call.
  TokenBlock newest(const ExecutionSpace& exec, int layer, std::int64_t tokens);
  /// Discards all queries. The next stored token must have this position.
  void restart(std::int64_t position);

  /// Returns whether queries are stored from step to step.
  bool lasts() const { return m_every_layer; }
  /// Returns the queries of each layer on the host, or none unless `lasts`. Waits.
  std::vector<SnapshotQueries> to_host() const;
  /// Restores the result of to_host, as far as the newest tokens fit. Throws Error if layers or
  /// extents differ.
  void from_host(const std::vector<SnapshotQueries>& layers);

 private:
  using Queries = Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace>;
  /// Stored queries of one layer, or of the current layer.
  struct Taken {
    Queries queries;                  // (slot, query head, dim); position p has slot p % capacity
    int layer = -1;                   // the layer of the queries
    std::int64_t begin = 0, end = 0;  // stored positions; only the newest `capacity` have queries
  };
  Taken& of(int layer) { return m_taken[m_taken.size() == 1 ? 0 : layer]; }

  std::int64_t m_capacity;
  std::vector<int> m_query_heads;
  int m_head_dim;
  bool m_every_layer;
  std::vector<Taken> m_taken;
  Queries m_ordered;
};

/// A policy's part in a step of one sequence, as a span of a StepBatch refers to it. The engine
/// makes it, and the decoder carries it out.
struct PolicyStep {
  Policy* policy = nullptr;
  /// Only store the queries of the newest tokens, for a later step.
  bool only_watches = false;
  /// Only show the step's blocks to the policy. It scores later, outside of steps
  /// (Policy::context_scores).
  bool only_observes = false;
  /// Score all rows of the sequence, or only those of the step.
  bool scores_all = true;
  /// The budget that the policy sees in PolicyLayer::Extents; may be null.
  const Budget* budget = nullptr;
  /// Choose by `budget` in each layer, before the next layer runs. Evicted rows are never stored.
  /// The sequence must have no rows yet, and `budget` must be by_layer().
  bool chooses = false;
  /// If it chooses: what the rows that stay take up of the others. Null or empty: nothing.
  const MergerMaker* merger = nullptr;
  /// Tokens seen minus positions, after renumbering (+rerotate). Budgets count tokens.
  std::int64_t removed_tokens = 0;
  /// Tokens of the question at the end of the step.
  std::int64_t question = 0;
  /// See PolicyLayer::Extents.
  std::int64_t repeats_begin = 0, repeats_end = 0;
  /// Storage for the queries of the newest tokens; null if the policy needs none.
  RecentQueries* recent = nullptr;
  /// Sums to which the attention of the step's last token is added; null: none.
  AttentionSums* sums = nullptr;
  /// Keep `scores` of all layers, for the choice after the step.
  bool keeps_scores = false;

  /// Returns whether the policy scores rows in this step.
  bool scores_rows() const { return !only_watches && !only_observes; }

  /// Result of the step if keeps_scores: (head on this rank, row) of each layer, rows by position.
  std::vector<Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>> scores;
};

}  // namespace kvzap::engine
