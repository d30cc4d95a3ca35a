// The dense feed-forward part of a layer.
#pragma once

#include "engine/adapters.hpp"
#include "engine/mixers.hpp"

namespace kvzap::engine {

/// y = down (activation(gate x) * up x), or down (activation(up x)). An RMS norm may precede down.
class FeedForwardBlock final : public ChannelMixer {
 public:
  using Weights = Model::Weights::FeedForward;

  void reserve(Step& step) override;
  linalg::Matrix run(Step& step, int layer, const linalg::Matrix& x) override;
  void release() override { m_adapters.release(); }

  /// Does the same with these weights. `rounded`: x rounded, or empty. y (row, hidden_size) may be
  /// x.
  static void run(Step& step, const Weights& weights, const linalg::Matrix& x,
                  const linalg::RoundedRows& rounded, const linalg::Matrix& y);
  /// Reserves the memory of a run with these weights.
  static void reserve(Step& step, const Weights& weights);

  /// The middle of such a run: `inputs`, those of down, from the gates in Step::gates. Returns them
  /// rounded, or empty if not `rounds` or if down is quantised.
  static linalg::RoundedRows gate(Step& step, const Weights& weights, bool rounds,
                                  const linalg::Matrix& inputs);
  /// Its end: multiplies y, the output of down, by the model's factor.
  static void multiply(const Step& step, const linalg::Matrix& y);

 private:
  static linalg::RoundedRows activated(Step& step, const Weights& weights, const linalg::Matrix& x,
                                       const linalg::RoundedRows& rounded);
  static void enter(Step& step, const Weights& weights, const linalg::Matrix& x,
                    const linalg::RoundedRows& rounded);
  void cut_gates(Step& step, int layer, float cutoff, std::int64_t m);
  static void leave(Step& step, const Weights& weights, const linalg::Matrix& inputs,
                    const linalg::RoundedRows& rounded, const linalg::Matrix& y);

  linalg::Vector m_moments;  // means, then variances, of the gates of rows that are cut
  linalg::Vector m_squares;  // sums for the norm of the inputs of down
  Adapters m_adapters;       // of layers with shared weights
};

}  // namespace kvzap::engine
