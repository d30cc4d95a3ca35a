// What gives a pair its score.
#pragma once

#include <kvzap/core/types.hpp>
#include <string>

namespace kvzap {

/// Scores the pairs of new tokens, higher meaning more worth keeping. A Decoder asks it once per
/// layer and block of tokens, whatever sequences these belong to.
class Scorer {
 public:
  using InputView = Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace>;
  using PositionView = Kokkos::View<const std::int64_t*, MemorySpace>;
  using ScoreView = Kokkos::View<float**, Kokkos::LayoutStride, MemorySpace>;

  virtual ~Scorer() = default;
  /// Fills scores (KV head on this rank, token) of M tokens of a layer. positions (M): where each
  /// stands in its sequence. hidden: (M, hidden_size), what enters attention, the same on all
  /// ranks. Called on every rank that takes part in the model, in the same order, also where it
  /// owns no head of the layer. Throws Error on extents that do not fit; a scorer that communicates
  /// does so on every rank even if something else fails on one of them, and throws afterwards.
  virtual void score(const ExecutionSpace& exec, int layer, const PositionView& positions,
                     const InputView& hidden, const ScoreView& scores) = 0;
  /// Takes the memory that score needs for up to `tokens` tokens, so that it cannot run out of it
  /// in the middle of a step. Called before each step.
  virtual void reserve(std::int64_t /*tokens*/) {}
  /// What to call it in reports: "linear", "mlp", "random", ...
  virtual std::string kind() const = 0;
};

}  // namespace kvzap
