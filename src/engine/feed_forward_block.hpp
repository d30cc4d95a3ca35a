// The dense feed-forward part of a layer.
#pragma once

#include "engine/mixers.hpp"

namespace kvzap::engine {

/// y = down (activation(gate x) * up x), or down (activation(up x))
class FeedForwardBlock final : public ChannelMixer {
 public:
  using Weights = Model::Weights::FeedForward;

  void reserve(Step& step) override;
  linalg::Matrix run(Step& step, int layer, const linalg::Matrix& x) override;

  /// Does the same with these weights. `rounded`: x rounded, or empty. y (row, hidden_size) may be
  /// x.
  static void run(Step& step, const Weights& weights, const linalg::Matrix& x,
                  const linalg::RoundedRows& rounded, const linalg::Matrix& y);
  /// Reserves the memory of a run with these weights.
  static void reserve(Step& step, const Weights& weights);

 private:
  static void enter(Step& step, const Weights& weights, const linalg::Matrix& x,
                    const linalg::RoundedRows& rounded);
  static void leave(Step& step, const Weights& weights, const linalg::Matrix& y);
  void cut_gates(Step& step, int layer, float cutoff, std::int64_t m);

  linalg::Vector m_moments;  // means, then variances, of the gates of rows that are cut
};

}  // namespace kvzap::engine
