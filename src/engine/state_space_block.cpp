#include "engine/state_space_block.hpp"

namespace kvzap::engine {

using linalg::Matrix;

namespace {

bool has_space(const Step& step, int layer) {
  const TokenMixing mixing = step.config.layer(layer).mixing;
  return mixing == TokenMixing::state_space || mixing == TokenMixing::attention_and_state_space;
}

StateSpace space_of(const Step& step, int layer) {
  return {*step.config.state_space, step.cache.shape().states[layer].heads,
          static_cast<std::int64_t>(step.weights(layer).space_numbers.extent(0))};
}

}  // namespace

void StateSpaceBlock::reserve(Step& step) {
  if (!step.model.weights().are_here()) return;
  const std::int64_t m = step.most_rows();
  for (int l = 0; l < static_cast<int>(step.config.num_hidden_layers); ++l) {
    if (!has_space(step, l)) continue;
    const StateSpace space = space_of(step, l);
    step.reserve(Step::mixed, m * space.values());
    step.reserve(Step::projected, m * space.columns());
    base::reserve_scratch(m_decays, m * space.heads, "kvzap::decoder::decays");
    base::reserve_scratch(m_sums, m * space.config.groups, "kvzap::decoder::squares");
  }
}

Matrix StateSpaceBlock::run(Step& step, int layer, const RowRange& rows, const Matrix& x) {
  const auto& weights = step.weights(layer);
  const StateSpace space = space_of(step, layer);
  SpaceTokens block;
  block.rows = step.matrix(Step::projected, rows.count(), space.columns());
  block.decays = Matrix(m_decays.data(), rows.count(), space.heads);
  block.outputs = step.matrix(Step::mixed, rows.count(), space.values());
  // (nvcc 13 does not compile these braces as an argument.)
  const SpaceWeights own{weights.convolution,  weights.convolution_bias, weights.space_rates,
                         weights.space_shifts, weights.space_skips,      weights.space_norm,
                         weights.space_heads,  weights.space_group,      weights.space_numbers};
  step.locally([&] {
    step.linear(step.exec, x, step.rounded, weights.mixer_in, weights.mixer_in_bias, block.rows);
    scale_projections(step.exec, space, block.rows);
    step.for_each_span(rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
      const SequenceId sequence = step.spans()[s].sequence;
      const auto state = step.cache.state(step.exec, sequence, layer);
      pass_state_space(step.exec, space, own, block.part(begin - rows.begin, end - rows.begin),
                       state.before, state.after);
      step.cache.count_tokens(sequence, layer, end - begin);
    });
  });
  finish(step, space, own, block);
  return block.outputs;
}

// Gates and norms. A group's heads may be on several ranks.
void StateSpaceBlock::finish(Step& step, const StateSpace& space, const SpaceWeights& weights,
                             const SpaceTokens& tokens) {
  using Gating = StateSpaceConfig::Gating;
  const Matrix sums(m_sums.data(), tokens.outputs.extent(0), space.config.groups);
  const auto gate = [&] { step.locally([&] { gate_outputs(step.exec, space, tokens); }); };
  if (space.config.gating != Gating::norm_before_gate) gate();
  if (space.config.gating == Gating::gate) return;
  step.locally([&] { sum_groups(step.exec, space, weights, tokens, sums); });
  step.exchange.sum(step.exec, step.comm, sums);
  step.locally([&] {
    norm_groups(step.exec, space, weights, tokens, sums,
                static_cast<float>(step.config.rms_norm_eps));
  });
  if (space.config.gating == Gating::norm_before_gate) gate();
}

}  // namespace kvzap::engine
