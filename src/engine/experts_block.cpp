#include "engine/experts_block.hpp"

#include <algorithm>

#include "engine/feed_forward_block.hpp"
#include "engine/step_kernels.hpp"

namespace kvzap::engine {

using linalg::Matrix;

namespace {

using Maps = std::vector<const linalg::LinearWeights*>;

/// A map of all experts of a layer.
Maps maps_of(const Model::Weights::Layer& layer,
             linalg::LinearWeights FeedForwardBlock::Weights::*map) {
  Maps maps;
  for (const auto& expert : layer.experts) maps.push_back(&(expert.*map));
  return maps;
}

bool serve_choices(const Model::Weights& weights) {
  using Weights = FeedForwardBlock::Weights;
  return std::all_of(weights.layers.begin(), weights.layers.end(), [](const auto& layer) {
    return layer.experts.empty() || (linalg::ChosenMaps::serve(maps_of(layer, &Weights::gate_up)) &&
                                     linalg::ChosenMaps::serve(maps_of(layer, &Weights::down)));
  });
}

}  // namespace

void ExpertsBlock::reserve(Step& step) {
  const std::int64_t m = step.most_rows();
  m_routes.reserve(*step.config.experts, m);
  for (linalg::Vector* const rows : {&m_outputs, &m_inputs, &m_expert_outputs}) {
    base::reserve_scratch(*rows, m * step.config.hidden_size, "kvzap::decoder::experts");
  }
  base::reserve_scratch(m_shared_logits, m, "kvzap::decoder::shared_logits");
  if (!m_serve_choices) m_serve_choices = serve_choices(step.model.weights());
  m_by_choices = may_choose(step);
  if (m_by_choices) reserve_chosen(step);
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
  if (!m_by_choices) m_routes.sort(step.exec, m, step.config.experts->per_token);
}

bool ExpertsBlock::may_choose(const Step& step) const {
  constexpr std::int64_t most_tokens = 16;
  const ExpertsConfig& config = *step.config.experts;
  // Biases of down are those of rank 0 alone.
  return base::machine().on_device() && step.tokens() <= most_tokens && config.identities == 0 &&
         !(config.has_biases && step.comm.size() > 1) && *m_serve_choices;
}

// Reserves the memory of all choices of the step's tokens.
void ExpertsBlock::reserve_chosen(Step& step) {
  const auto& layers = step.model.weights().layers;
  const std::int64_t choices = step.tokens() * step.config.experts->per_token;
  base::reserve_scratch(m_expert_outputs, choices * step.config.hidden_size,
                        "kvzap::decoder::experts");
  for (const auto& layer : layers) {
    if (layer.experts.empty()) continue;
    step.reserve(Step::gates, choices * layer.experts.front().gate_up.outputs());
    step.reserve(Step::projected, choices * layer.experts.front().down.inputs());
  }
  if (!m_maps.empty()) return;
  std::vector<LayerMaps> all;
  for (const auto& layer : layers) {
    all.emplace_back();
    if (layer.experts.empty()) continue;
    std::vector<linalg::ConstVector> gate_up_bias, down_bias;
    for (const auto& expert : layer.experts) {
      gate_up_bias.emplace_back(expert.gate_up_bias);
      down_bias.emplace_back(expert.down_bias);
    }
    all.back() = {{maps_of(layer, &FeedForwardBlock::Weights::gate_up), gate_up_bias},
                  {maps_of(layer, &FeedForwardBlock::Weights::down), down_bias}};
  }
  m_maps = std::move(all);
}

// Adds the output of the chosen experts to y, by kernels over all choices of all tokens.
void ExpertsBlock::run_chosen(Step& step, int layer, const Matrix& x, const Matrix& y) {
  const ExecutionSpace& exec = step.exec;
  const ExpertsConfig& config = *step.config.experts;
  const FeedForwardBlock::Weights& any = step.weights(layer).experts.front();
  const std::int64_t choices = static_cast<std::int64_t>(x.extent(0)) * config.per_token;
  const Matrix gates = step.matrix(Step::gates, choices, any.gate_up.outputs());
  const Matrix inputs = step.matrix(Step::projected, choices, any.down.inputs());
  const Matrix outputs(m_expert_outputs.data(), choices, x.extent(1));
  const ExpertRoutes::Rows chosen = m_routes.chosen(choices);
  linalg::ConstVector weights = m_routes.chosen_weights(choices);
  m_maps[layer].gate_up(exec, x, config.per_token, chosen, gates);
  if (config.scales_input) {
    scale_rows(exec, weights, gates);  // as if x were scaled: there are no biases then
    weights = {};
  }
  FeedForwardBlock::gate(step, any, false, inputs);
  m_maps[layer].down(exec, inputs, 1, chosen, outputs);
  FeedForwardBlock::multiply(step, outputs);
  add_choices(exec, outputs, weights, y);
}

Matrix ExpertsBlock::run_routed(Step& step, int layer, const Matrix& x) {
  const ExecutionSpace& exec = step.exec;
  const auto& weights = step.weights(layer);
  const auto m = static_cast<std::int64_t>(x.extent(0));
  const auto hidden = static_cast<std::int64_t>(x.extent(1));
  const Matrix y(m_outputs.data(), m, hidden);
  run_shared(step, layer, x, y);
  if (m_by_choices) run_chosen(step, layer, x, y);
  for (std::size_t e = 0; !m_by_choices && e < weights.experts.size(); ++e) {
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
