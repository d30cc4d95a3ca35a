// A gated short convolution as a layer's token mixer.
#pragma once

#include "engine/convolution.hpp"
#include "engine/mixers.hpp"

namespace kvzap::engine {

/// b, c and x → b x → convolution → times c. A rank has some channels (HeadPartition::state_heads);
/// Model::Weights::Layer::mixer_in has its b, then its c, then its x.
class ShortConvolutionBlock final : public TokenMixer {
 public:
  void reserve(Step& step) override;
  linalg::Matrix run(Step& step, int layer, const RowRange& rows, const linalg::Matrix& x) override;
};

/// y (token, n) = the first n columns of `projected` times the last n, of 3 n columns.
void multiply_inputs(const ExecutionSpace& exec, const linalg::ConstMatrix& projected,
                     const linalg::Matrix& y);
/// y *= the columns in the middle.
void multiply_outputs(const ExecutionSpace& exec, const linalg::ConstMatrix& projected,
                      const linalg::Matrix& y);

}  // namespace kvzap::engine
