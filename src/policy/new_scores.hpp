// Scores that policies compute from hidden states in `observe`, stored until `score` needs them.
#pragma once

#include <kvzap/engine/policy.hpp>

namespace kvzap::policy {

/// Scores of the step's tokens in one layer, block by block.
class NewScores {
 public:
  using View = Kokkos::View<float**, Kokkos::LayoutStride, MemorySpace>;

  /// Returns the place for the block's scores: (head on this rank, token of the block).
  View block(const PolicyLayer& layer, const TokenBlock& block);
  /// Sets the scores of all rows: first the scores of the cached rows (NaN if none), then those of
  /// the step's blocks. Throws Error if the blocks do not cover all of the step's tokens.
  void fill(PolicyLayer& layer, const Policy::ScoreView& scores);

 private:
  Kokkos::View<float*, MemorySpace> m_scores;  // (head, new token)
  int m_layer = -1;
  std::int64_t m_next = 0;   // first position of the next block
  std::int64_t m_count = 0;  // tokens that have scores
};

/// Returns the block's hidden states row after row without gaps: in place, or copied into `room`.
Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace> packed_hidden(
    const ExecutionSpace& exec, const TokenBlock& block, Kokkos::View<float*, MemorySpace>& room);

}  // namespace kvzap::policy
