#include "engine/experts_block.hpp"

#include "engine/feed_forward_block.hpp"
#include "engine/step_kernels.hpp"

namespace kvzap::engine {

using linalg::Matrix;

void ExpertsBlock::reserve(Step& step) {
  const std::int64_t m = step.most_rows();
  m_routes.reserve(*step.config.experts, m);
  for (linalg::Vector* const rows : {&m_outputs, &m_inputs, &m_expert_outputs}) {
    base::reserve_scratch(*rows, m * step.config.hidden_size, "kvzap::decoder::experts");
  }
  base::reserve_scratch(m_shared_logits, m, "kvzap::decoder::shared_logits");
  for (const auto& layer : step.model.weights().layers) {
    if (layer.experts.empty()) continue;
    FeedForwardBlock::reserve(step, layer.dense);
    FeedForwardBlock::reserve(step, layer.experts.front());
  }
}

Matrix ExpertsBlock::run(Step& step, int layer, const Matrix& x) {
  Matrix y = x;
  step.locally([&] {
    // The router first: a later product may reuse the rounded rows.
    route(step, layer, x);
    y = run_routed(step, layer, x);
  });
  return y;
}

void ExpertsBlock::route(Step& step, int layer, const Matrix& x) {
  const auto& weights = step.weights(layer);
  const auto m = static_cast<std::int64_t>(x.extent(0));
  step.linear(step.exec, x, step.rounded, weights.router, {}, m_routes.logits(m));
  m_routes.choose(step.exec, *step.config.experts, m,
                  {weights.correction, weights.router_bias, weights.expert_scales});
}

Matrix ExpertsBlock::run_routed(Step& step, int layer, const Matrix& x) {
  const ExecutionSpace& exec = step.exec;
  const auto& weights = step.weights(layer);
  const auto m = static_cast<std::int64_t>(x.extent(0));
  const auto hidden = static_cast<std::int64_t>(x.extent(1));
  const Matrix y(m_outputs.data(), m, hidden);
  run_shared(step, layer, x, y);
  for (std::size_t e = 0; e < weights.experts.size(); ++e) {
    auto tokens = m_routes.tokens_of(static_cast<std::int64_t>(e));
    const auto count = static_cast<std::int64_t>(tokens.rows.extent(0));
    if (count == 0) continue;
    const Matrix input(m_inputs.data(), count, hidden);
    const Matrix output(m_expert_outputs.data(), count, hidden);
    gather_rows(exec, x, tokens.rows, input);
    if (step.config.experts->scales_input) {
      scale_rows(exec, tokens.weights, input);
      tokens.weights = {};
    }
    FeedForwardBlock::run(step, weights.experts[e], input, linalg::RoundedRows(), output);
    add_weighted_rows(exec, output, tokens, y);
  }
  if (step.comm.rank() == 0) add_identities(step, x, y);
  if (step.config.experts->averages_shared) scale(exec, y, 0.5f);
  return y;
}

// Adds the inputs of the tokens of ExpertsConfig::identities. One rank does so for all.
void ExpertsBlock::add_identities(Step& step, const Matrix& x, const Matrix& y) {
  const ExpertsConfig& config = *step.config.experts;
  for (std::int64_t e = config.count; e < config.routes(); ++e) {
    const auto tokens = m_routes.tokens_of(e);
    const auto count = static_cast<std::int64_t>(tokens.rows.extent(0));
    if (count == 0) continue;
    const Matrix input(m_inputs.data(), count, x.extent(1));
    gather_rows(step.exec, x, tokens.rows, input);
    add_weighted_rows(step.exec, input, tokens, y);
  }
}

// Sets y to the output of the shared expert, or to 0 without one.
void ExpertsBlock::run_shared(Step& step, int layer, const Matrix& x, const Matrix& y) {
  const auto& weights = step.weights(layer);
  if (weights.dense.gate_up.outputs() == 0 || step.config.experts->have_dense_part()) {
    return clear(step.exec, y);
  }
  const bool is_gated = weights.shared_gate.outputs() > 0;
  const Matrix logits(m_shared_logits.data(), x.extent(0), 1);
  if (is_gated) step.linear(step.exec, x, step.rounded, weights.shared_gate, {}, logits);
  FeedForwardBlock::run(step, weights.dense, x, step.rounded, y);
  if (is_gated) gate_rows(step.exec, logits, y);
}

void ExpertsBlock::release() {
  m_routes.release();
  m_outputs = m_inputs = m_expert_outputs = m_shared_logits = {};
}

}  // namespace kvzap::engine
