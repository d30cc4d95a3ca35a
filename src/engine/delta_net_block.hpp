// A gated delta net as a layer's token mixer.
#pragma once

#include "engine/delta_net.hpp"
#include "engine/mixers.hpp"

namespace kvzap::engine {

/// q, k, v, gates, strengths and decays → convolution → recurrence → norm → gates. In lightning
/// attention q, k, v and gates alone, and no convolution.
class DeltaNetBlock final : public TokenMixer {
 public:
  void reserve(Step& step) override;
  linalg::Matrix run(Step& step, int layer, const RowRange& rows, const linalg::Matrix& x) override;
  void release() override { m_rates = m_latents = m_squares = {}; }

 private:
  static DeltaNet net_of(const Step& step, int layer) {
    return {*step.config.delta_net, step.cache.shape().states[layer].heads};
  }

  static void project(Step& step, int layer, const linalg::Matrix& x, const DeltaNet& net,
                      const DeltaTokens& block, const linalg::Matrix& latents);

  linalg::Vector m_rates;    // strengths and decays
  linalg::Vector m_latents;  // of decays and gates
  linalg::Vector m_squares;
};

}  // namespace kvzap::engine
