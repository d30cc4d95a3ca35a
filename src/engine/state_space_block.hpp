// A selective state space as a layer's token mixer.
#pragma once

#include "engine/mixers.hpp"
#include "engine/state_space.hpp"

namespace kvzap::engine {

/// x, B, C, z and d → convolution → recurrence → gates and norms. Mamba-1: x and z → convolution →
/// B, C and d → recurrence → gates
class StateSpaceBlock final : public TokenMixer {
 public:
  void reserve(Step& step) override;
  linalg::Matrix run(Step& step, int layer, const RowRange& rows, const linalg::Matrix& x) override;
  void release() override { m_decays = m_sums = m_latents = {}; }

 private:
  void derive_steps(Step& step, int layer, const StateSpace& space, const linalg::Matrix& rows);
  void finish(Step& step, const StateSpace& space, const SpaceWeights& weights,
              const SpaceTokens& tokens);

  linalg::Vector m_decays;
  linalg::Vector m_sums;     // of squares, for norms
  linalg::Vector m_latents;  // (row, group of all ranks, StateSpaceConfig::latents())
};

}  // namespace kvzap::engine
