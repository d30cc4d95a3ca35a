// What an eviction policy does in a step of one sequence.
#pragma once

#include <kvzap/engine/budget.hpp>
#include <kvzap/engine/policy.hpp>
#include <kvzap/engine/snapshot.hpp>
#include <vector>

namespace kvzap {

/// Queries of the newest tokens of one sequence. Kept from step to step for all layers, or, where
/// no later step asks for them, for the layer at hand alone.
class RecentQueries {
 public:
  /// `tokens` newest tokens; query_heads: of each layer, on this rank.
  RecentQueries(std::int64_t tokens, const std::vector<int>& query_heads, int head_dim,
                bool every_layer);
  /// A copy with memory of its own, for a fork or a checkpoint.
  RecentQueries clone() const;

  std::int64_t capacity() const { return m_capacity; }
  /// Takes those of a block. Where tokens between it and the ones taken before are missing, those
  /// before are forgotten; where it goes back (a step is tried again), what it replaces is.
  void take(const ExecutionSpace& exec, int layer, const TokenBlock& block);
  /// The newest ones of a sequence of `tokens` tokens, as many as have been taken without a gap;
  /// valid until the next call.
  TokenBlock newest(const ExecutionSpace& exec, int layer, std::int64_t tokens);
  /// Forgets all; the next token taken has this position.
  void restart(std::int64_t position);

  /// Whether they are kept from step to step.
  bool lasts() const { return m_every_layer; }
  /// Those of each layer on the host; none unless they last. Waits.
  std::vector<SnapshotQueries> to_host() const;
  /// Takes what to_host gave, of as many of the newest tokens as there is room for. Throws Error if
  /// layers or extents differ.
  void from_host(const std::vector<SnapshotQueries>& layers);

 private:
  using Queries = Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace>;
  /// Of one layer, or of the one at hand.
  struct Taken {
    Queries queries;                  // (slot, query head, dim); position p has slot p % capacity
    int layer = -1;                   // whose they are
    std::int64_t begin = 0, end = 0;  // positions that are there, of them the newest `capacity`
  };
  Taken& of(int layer) { return m_taken[m_taken.size() == 1 ? 0 : layer]; }

  std::int64_t m_capacity;
  std::vector<int> m_query_heads;
  int m_head_dim;
  bool m_every_layer;
  std::vector<Taken> m_taken;
  Queries m_ordered;
};

/// A policy's part in a step of one sequence, as a span of a StepBatch names it. The engine makes
/// it, the decoder carries it out.
struct PolicyStep {
  Policy* policy = nullptr;
  /// Only keep the queries of the newest tokens, for a later step.
  bool only_watches = false;
  /// Only show it the step's blocks: it scores later, outside of steps (Policy::context_scores).
  bool only_observes = false;
  /// Which rows are scored: all that the sequence has, or the step's alone.
  bool scores_all = true;
  /// The budget that the policy sees in PolicyLayer::Extents; may be null.
  const Budget* budget = nullptr;
  /// Choose by `budget` in each layer, before the next one runs: rows that do not stay are never
  /// stored. The sequence has no rows yet, and `budget` is by_layer().
  bool chooses = false;
  /// Positions fewer than tokens that the sequence has seen (+rerotate), which budgets count.
  std::int64_t closed_up = 0;
  /// Tokens of the question at the end of the step.
  std::int64_t question = 0;
  /// See PolicyLayer::Extents.
  std::int64_t repeats_begin = 0, repeats_end = 0;
  /// Where queries of the newest tokens are kept; null if the policy needs none.
  RecentQueries* recent = nullptr;
  /// Keep `scores` of all layers, to choose by after the step.
  bool keeps_scores = false;

  /// Whether the policy scores rows in this step.
  bool scores_rows() const { return !only_watches && !only_observes; }

  /// Left by the step if keeps_scores: (head on this rank, row) of each layer, rows by position.
  std::vector<Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>> scores;
};

}  // namespace kvzap
