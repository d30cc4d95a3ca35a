// Scores that policies make of hidden states in `observe`, kept until `score` asks for them.
#pragma once

#include <kvzap/engine/policy.hpp>

namespace kvzap::detail {

/// Scores of the step's tokens in one layer, block by block.
class NewScores {
 public:
  using View = Kokkos::View<float**, Kokkos::LayoutStride, MemorySpace>;

  /// (head on this rank, token of the block): where to write the block's scores.
  View block(const PolicyLayer& layer, const TokenBlock& block);
  /// Scores of all rows: those that cached rows have, NaN if none, then those of the blocks since
  /// the step's first. Throws Error if these are not all of the step's tokens.
  void fill(PolicyLayer& layer, const Policy::ScoreView& scores);

 private:
  Kokkos::View<float*, MemorySpace> m_scores;  // (head, new token)
  int m_layer = -1;
  std::int64_t m_next = 0;   // position that the next block begins with
  std::int64_t m_count = 0;  // tokens that have scores
};

/// The block's hidden states row after row without gaps: as they lie, or copied into `room`.
Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace> packed_hidden(
    const ExecutionSpace& exec, const TokenBlock& block, Kokkos::View<float*, MemorySpace>& room);

}  // namespace kvzap::detail
