// The interface of scorers: they score pairs from hidden states.
#pragma once

#include <kvzap/core/types.hpp>
#include <string>

namespace kvzap {

/// Scores the pairs of new tokens; a higher score means more worth keeping. A Decoder calls it once
/// per layer and block of tokens, for all sequences together.
class Scorer {
 public:
  using InputView = Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace>;
  using PositionView = Kokkos::View<const std::int64_t*, MemorySpace>;
  using ScoreView = Kokkos::View<float**, Kokkos::LayoutStride, MemorySpace>;

  virtual ~Scorer() = default;
  /// Fills scores (KV head on this rank, token) of M tokens of a layer.
  ///
  /// positions: (M), the position of each token in its sequence.
  /// hidden: (M, hidden_size), the input of attention, the same on all ranks.
  ///
  /// Called on every rank that shares the model, in the same order, even where the rank owns no
  /// head of the layer. Throws Error if extents do not fit. A scorer that communicates does so on
  /// every rank, even if it fails on one of them, and throws afterwards.
  virtual void score(const ExecutionSpace& exec, int layer, const PositionView& positions,
                     const InputView& hidden, const ScoreView& scores) = 0;
  /// Allocates the memory that `score` needs for up to `tokens` tokens, so that a step cannot run
  /// out of it. Called before each step.
  virtual void reserve(std::int64_t /*tokens*/) {}
  /// Returns whether `score` on one rank does nothing but launch the same kernels whenever it has
  /// the same arguments, so that its launches can be repeated without a call.
  virtual bool is_repeatable() const { return false; }
  /// Returns its name in reports: "linear", "mlp", "random", ...
  virtual std::string kind() const = 0;
};

}  // namespace kvzap
