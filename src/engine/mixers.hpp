// The two parts of a layer, between norms and residual connections: a token mixer, such as
// attention, and a channel mixer, such as a feed-forward part.
#pragma once

#include "engine/step.hpp"

namespace kvzap::engine {

/// A part of layers, with its own memory. One object serves all layers of its kind.
class LayerBlock {
 public:
  virtual ~LayerBlock() = default;
  /// Reserves the memory of a step for all layers of the block.
  virtual void reserve(Step& step) = 0;
  /// Called once a step, before the first layer, if the layers run in the library.
  virtual void begin(Step& /*step*/) {}
  /// Frees the memory that grows with the tokens.
  virtual void release() {}
};

/// The part of a layer in which tokens see one another. Its last product, with
/// Model::Weights::Layer::o, and the sum over ranks are the decoder's.
class TokenMixer : public LayerBlock {
 public:
  /// Returns this rank's inputs of the last product, (row, input), for x (row of `rows`,
  /// hidden_size; for attention ModelConfig::attention_inputs()), the norm of the layer's input;
  /// Step::rounded is x rounded, or empty. Returns an empty matrix if nothing reads them
  /// (Step::read_rows). The decoder counts the tokens of layers with a state
  /// (KVCache::count_tokens). Collective: errors wait in the step.
  virtual linalg::Matrix run(Step& step, int layer, const RowRange& rows,
                             const linalg::Matrix& x) = 0;
};

/// The part of a layer that treats each token alone.
class ChannelMixer : public LayerBlock {
 public:
  /// Returns this rank's part of the output, (row, hidden_size), for x (row, hidden_size). The sum
  /// over ranks completes it. The output may overwrite x. Step::rounded: x rounded, or empty.
  /// Collective: errors wait in the step.
  virtual linalg::Matrix run(Step& step, int layer, const linalg::Matrix& x) = 0;
};

/// Divides the rows of x, each of which is a part of a row of `columns` values over all ranks, by
/// the root of the whole row's mean square + eps, and multiplies them by this rank's `weights`: an
/// RMS norm. sums (row, 2) is memory. Collective: errors wait in the step.
void norm_inputs(Step& step, const linalg::Matrix& x, const linalg::ConstVector& weights, float eps,
                 std::int64_t columns, const linalg::Matrix& sums);

}  // namespace kvzap::engine
