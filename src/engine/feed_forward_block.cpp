#include "engine/feed_forward_block.hpp"

#include "engine/step_kernels.hpp"

namespace kvzap::engine {

void FeedForwardBlock::reserve(Step& step) {
  for (const auto& layer : step.model.weights().layers) reserve(step, layer.dense);
}

void FeedForwardBlock::reserve(Step& step, const Weights& weights) {
  const std::int64_t gate_up = weights.gate_up.outputs();
  step.reserve(Step::gates, step.most_rows() * gate_up);
  step.reserve(Step::projected, step.most_rows() * (gate_up / 2));
}

linalg::Matrix FeedForwardBlock::run(Step& step, int layer, const linalg::Matrix& x) {
  run(step, step.weights(layer).dense, x, step.rounded, x);
  return x;
}

void FeedForwardBlock::run(Step& step, const Weights& weights, const linalg::Matrix& x,
                           linalg::RoundedRows rounded, const linalg::Matrix& y) {
  const auto m = static_cast<std::int64_t>(x.extent(0));
  const std::int64_t width = weights.gate_up.outputs() / 2;
  const linalg::Matrix gate_up = step.matrix(Step::gates, m, 2 * width);
  step.linear(step.exec, x, rounded, weights.gate_up, weights.gate_up_bias, gate_up);
  rounded = step.linear.room_for_rounded(weights.down.dtype(), m, width);
  const linalg::Matrix gated = step.matrix(Step::projected, m, width);
  activate(step.exec, gate_up, gated, rounded, step.config.activation,
           static_cast<float>(step.config.gate_limit));
  step.linear(step.exec, gated, rounded, weights.down, weights.down_bias, y);
}

}  // namespace kvzap::engine
