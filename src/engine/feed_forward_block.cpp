#include "engine/feed_forward_block.hpp"

#include "engine/step_kernels.hpp"

namespace kvzap::engine {

namespace {

std::int64_t width_of(const Step& step, const FeedForwardBlock::Weights& weights) {
  return weights.gate_up.outputs() / (step.config.gates_feed_forward ? 2 : 1);
}

}  // namespace

void FeedForwardBlock::reserve(Step& step) {
  for (const auto& layer : step.model.weights().layers) reserve(step, layer.dense);
}

void FeedForwardBlock::reserve(Step& step, const Weights& weights) {
  step.reserve(Step::gates, step.most_rows() * weights.gate_up.outputs());
  step.reserve(Step::projected, step.most_rows() * width_of(step, weights));
}

linalg::Matrix FeedForwardBlock::run(Step& step, int layer, const linalg::Matrix& x) {
  run(step, step.weights(layer).dense, x, step.rounded, x);
  return x;
}

void FeedForwardBlock::run(Step& step, const Weights& weights, const linalg::Matrix& x,
                           linalg::RoundedRows rounded, const linalg::Matrix& y) {
  const auto m = static_cast<std::int64_t>(x.extent(0));
  const std::int64_t width = width_of(step, weights);
  const linalg::Matrix gate_up = step.matrix(Step::gates, m, weights.gate_up.outputs());
  step.linear(step.exec, x, rounded, weights.gate_up, weights.gate_up_bias, gate_up);
  rounded = step.linear.room_for_rounded(weights.down.dtype(), m, width);
  const linalg::Matrix gated = step.matrix(Step::projected, m, width);
  activate(step.exec, gate_up, gated, rounded,
           {step.config.activation, static_cast<float>(step.config.gate_limit),
            step.config.gates_feed_forward, weights.xielu});
  step.linear(step.exec, gated, rounded, weights.down, weights.down_bias, y);
}

}  // namespace kvzap::engine
