// What a step shows to an observer.
#pragma once

#include <kvzap/core/cache.hpp>

namespace kvzap {

/// Receives the intermediate values of a step, for training surrogates and for tests. Called on
/// every rank.
class StepObserver {
 public:
  using HiddenView = Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace>;
  using ScoresView = Kokkos::View<const float**, Kokkos::LayoutStride, MemorySpace>;
  virtual ~StepObserver() = default;
  /// Receives the input of attention of `layer`. hidden: (token, hidden_size), consecutive tokens
  /// of one sequence; the first has position `first`.
  virtual void attention_input(SequenceId /*sequence*/, int /*layer*/, std::int64_t /*first*/,
                               const HiddenView& /*hidden*/) {}
  /// Receives the scores (head on this rank, token) of a span's tokens, from position `first` on.
  virtual void scores(SequenceId /*sequence*/, int /*layer*/, std::int64_t /*first*/,
                      const ScoresView& /*scores*/) {}
};

}  // namespace kvzap
