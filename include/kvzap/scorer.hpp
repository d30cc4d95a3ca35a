// What gives a pair its score.
#pragma once

#include <kvzap/types.hpp>
#include <string>

namespace kvzap {

/// Scores the pairs of new tokens, higher meaning more worth keeping. A Decoder asks it once per
/// layer and block of tokens.
class Scorer {
 public:
  using InputView = Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace>;
  using ScoreView = Kokkos::View<float**, Kokkos::LayoutStride, MemorySpace>;

  virtual ~Scorer() = default;
  /// Fills scores (KV head on this rank, token) of M tokens of a layer, of which the first is at
  /// position `first`. hidden: (M, hidden_size), what enters attention, the same on all ranks.
  /// Called on every rank that takes part in the model, in the same order, also where it owns no
  /// head of the layer. Throws Error on extents that do not fit.
  virtual void score(const ExecutionSpace& exec, int layer, std::int64_t first,
                     const InputView& hidden, const ScoreView& scores) = 0;
  /// What to call it in reports: "linear", "mlp", "random", ...
  virtual std::string kind() const = 0;
};

}  // namespace kvzap
