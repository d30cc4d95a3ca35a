#include "engine/feed_forward_block.hpp"

#include "engine/step_kernels.hpp"
#include "engine/stream_kernels.hpp"

namespace kvzap::engine {

namespace {

std::int64_t width_of(const Step& step, const FeedForwardBlock::Weights& weights) {
  return weights.gate_up.outputs() / (step.config.gates_feed_forward ? 2 : 1);
}

}  // namespace

void FeedForwardBlock::reserve(Step& step) {
  for (const auto& layer : step.model.weights().layers) {
    reserve(step, layer.dense);
    if (step.config.shared_blocks) m_adapters.reserve(step, layer.gate_up_adapter);
  }
  const auto& layers = step.config.layers;
  if (std::any_of(layers.begin(), layers.end(), [](const auto& l) { return !!l.gate_cutoff; })) {
    base::reserve_scratch(m_moments, 2 * step.most_rows(), "kvzap::decoder::moments");
  }
  if (!step.config.has_inner_norms) return;
  base::reserve_scratch(m_squares, 2 * step.most_rows(), "kvzap::decoder::squares");
}

void FeedForwardBlock::reserve(Step& step, const Weights& weights) {
  step.reserve(Step::gates, step.most_rows() * weights.gate_up.outputs());
  step.reserve(Step::projected, step.most_rows() * width_of(step, weights));
}

linalg::Matrix FeedForwardBlock::run(Step& step, int layer, const linalg::Matrix& x) {
  const Weights& weights = step.weights(layer).dense;
  const auto m = static_cast<std::int64_t>(x.extent(0));
  linalg::RoundedRows rounded;
  step.locally([&] {
    rounded = activated(step, weights, x, step.rounded);
    if (rounded.exist()) return;
    enter(step, weights, x, step.rounded);
    m_adapters.add(step, step.weights(layer).gate_up_adapter, x, step.rounded,
                   step.matrix(Step::gates, m, weights.gate_up.outputs()));
  });
  if (const auto cutoff = step.config.layer(layer).gate_cutoff) {
    cut_gates(step, layer, static_cast<float>(*cutoff), m);
  }
  const linalg::Matrix inputs = step.matrix(Step::projected, m, width_of(step, weights));
  step.locally([&] {
    if (!rounded.exist()) rounded = gate(step, weights, !step.config.has_inner_norms, inputs);
  });
  if (step.config.has_inner_norms) {
    norm_inputs(step, inputs, weights.inner_norm, static_cast<float>(step.config.rms_norm_eps),
                step.config.intermediate_size, linalg::Matrix(m_squares.data(), m, 2));
  }
  step.locally([&] { leave(step, weights, inputs, rounded, x); });
  return x;
}

void FeedForwardBlock::run(Step& step, const Weights& weights, const linalg::Matrix& x,
                           const linalg::RoundedRows& rounded, const linalg::Matrix& y) {
  const linalg::Matrix inputs = step.matrix(Step::projected, x.extent(0), width_of(step, weights));
  const linalg::RoundedRows at_once = activated(step, weights, x, rounded);
  if (at_once.exist()) return leave(step, weights, inputs, at_once, y);
  enter(step, weights, x, rounded);
  leave(step, weights, inputs, gate(step, weights, true, inputs), y);
}

// The inputs of down in bf16, in the memory of the gates, if the first product can activate its
// sums; else empty.
linalg::RoundedRows FeedForwardBlock::activated(Step& step, const Weights& weights,
                                                const linalg::Matrix& x,
                                                const linalg::RoundedRows& rounded) {
  const auto epilogue = model::epilogue_of(step.config);
  const bool fits = epilogue && weights.down.quantised() == nullptr &&
                    weights.down.dtype() == DType::bf16 &&
                    weights.rounded_bias.extent(0) == weights.gate_up_bias.extent(0);
  if (!fits) return {};
  linalg::Activated result;
  result.epilogue = *epilogue;
  result.bias = weights.rounded_bias;
  result.values = reinterpret_cast<bfloat16*>(step.data(Step::gates));
  return step.linear.activated(step.exec, x, rounded, weights.gate_up, result);
}

// Gates and up projections, to Step::gates.
void FeedForwardBlock::enter(Step& step, const Weights& weights, const linalg::Matrix& x,
                             const linalg::RoundedRows& rounded) {
  const auto m = static_cast<std::int64_t>(x.extent(0));
  step.linear(step.exec, x, rounded, weights.gate_up, weights.gate_up_bias,
              step.matrix(Step::gates, m, weights.gate_up.outputs()));
}

// Cuts the gates by their mean and deviation, which ranks compute together. Collective.
void FeedForwardBlock::cut_gates(Step& step, int layer, float cutoff, std::int64_t m) {
  const Weights& weights = step.weights(layer).dense;
  const LayerConfig own = step.config.layer(layer);
  const std::int64_t all =
      own.intermediate_size == 0 ? step.config.intermediate_size : own.intermediate_size;
  const auto share = 1 / static_cast<float>(all);
  const std::int64_t width = width_of(step, weights);
  const linalg::Matrix gates = step.matrix(Step::gates, m, weights.gate_up.outputs());
  const linalg::Matrix means(m_moments.data(), m, 1), variances(m_moments.data() + m, m, 1);
  for (const bool squares : {false, true}) {
    const linalg::Matrix sums = squares ? variances : means;
    step.locally([&] {
      sum_rows(step.exec, gates, width, squares ? means : linalg::Matrix(), squares, sums);
    });
    step.exchange.sum(step.exec, step.comm, sums);
    step.locally([&] { scale(step.exec, sums, share); });
  }
  step.locally([&] { cut_rows(step.exec, gates, width, means, variances, cutoff); });
}

// inputs = activation(gates) * up, those of down. Returns them rounded, or empty if not `rounds` or
// if down is quantised: then its products take floats. If they are rounded, `inputs` is
// unspecified.
linalg::RoundedRows FeedForwardBlock::gate(Step& step, const Weights& weights, bool rounds,
                                           const linalg::Matrix& inputs) {
  const std::int64_t m = inputs.extent(0), width = inputs.extent(1);
  const linalg::Matrix gate_up = step.matrix(Step::gates, m, weights.gate_up.outputs());
  const auto gate_multiplier = static_cast<float>(step.config.gate_multiplier);
  if (gate_multiplier != 1) scale_columns(step.exec, gate_up, 0, width, gate_multiplier);
  linalg::RoundedRows rounded;
  if (rounds && weights.down.quantised() == nullptr) {
    rounded = step.linear.room_for_rounded(weights.down.dtype(), m, width);
  }
  activate(step.exec, gate_up, inputs, rounded,
           {step.config.activation, static_cast<float>(step.config.gate_limit),
            step.config.gates_feed_forward, weights.xielu, weights.limit});
  return rounded;
}

// y = down inputs
void FeedForwardBlock::leave(Step& step, const Weights& weights, const linalg::Matrix& inputs,
                             const linalg::RoundedRows& rounded, const linalg::Matrix& y) {
  step.linear(step.exec, inputs, rounded, weights.down, weights.down_bias, y);
  multiply(step, y);
}

void FeedForwardBlock::multiply(const Step& step, const linalg::Matrix& y) {
  const auto multiplier = static_cast<float>(step.config.feed_forward_multiplier);
  if (multiplier != 1) scale(step.exec, y, multiplier);
}

}  // namespace kvzap::engine
