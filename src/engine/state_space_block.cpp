#include "engine/state_space_block.hpp"

#include "engine/expert_routes.hpp"
#include "engine/step_kernels.hpp"

namespace kvzap::engine {

using linalg::Matrix;

namespace {

StateSpace space_of(const Step& step, int layer) {
  return {*step.config.state_space, step.cache.shape().states[layer].heads,
          static_cast<std::int64_t>(step.weights(layer).space_numbers.extent(0))};
}

Matrix columns_of_space(const Matrix& matrix, std::int64_t begin, std::int64_t count) {
  return Kokkos::subview(matrix, Kokkos::ALL, range(begin, begin + count));
}

}  // namespace

void StateSpaceBlock::reserve(Step& step) {
  if (!step.model.weights().are_here()) return;
  const std::int64_t m = step.most_rows();
  for (int l = 0; l < static_cast<int>(step.config.num_hidden_layers); ++l) {
    if (!step.config.layer(l).has_state_space()) continue;
    const StateSpace space = space_of(step, l);
    step.reserve(Step::mixed, m * space.values());
    step.reserve(Step::projected, m * space.columns());
    if (space.config.is_mamba1()) {
      const std::int64_t latents = m * space.config.groups * space.config.latents();
      base::reserve_scratch(m_latents, latents, "kvzap::decoder::latents");
      step.exchange.reserve(step.comm, latents, 0);
      continue;
    }
    base::reserve_scratch(m_decays, m * space.heads, "kvzap::decoder::decays");
    base::reserve_scratch(m_sums, m * space.config.groups, "kvzap::decoder::squares");
  }
}

Matrix StateSpaceBlock::run(Step& step, int layer, const RowRange& rows, const Matrix& x) {
  const auto& weights = step.weights(layer);
  const StateSpace space = space_of(step, layer);
  SpaceTokens block;
  block.rows = step.matrix(Step::projected, rows.count(), space.columns());
  block.decays = Matrix(m_decays.data(), rows.count(), space.config.is_mamba1() ? 0 : space.heads);
  block.outputs = step.matrix(Step::mixed, rows.count(), space.values());
  // (nvcc 13 does not compile these braces as an argument.)
  const SpaceWeights own{weights.convolution,  weights.convolution_bias, weights.space_rates,
                         weights.space_shifts, weights.space_skips,      weights.space_norm,
                         weights.space_heads,  weights.space_group,      weights.space_numbers};
  const auto for_each_part = [&](const auto& work) {
    step.for_each_span(rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
      const SequenceId sequence = step.spans()[s].sequence;
      const auto state = step.cache.state(step.exec, sequence, layer);
      work(block.part(begin - rows.begin, end - rows.begin), state);
    });
  };
  step.locally([&] {
    step.linear(step.exec, x, step.rounded, weights.mixer_in, weights.mixer_in_bias,
                columns_of_space(block.rows, 0, space.projections()));
    scale_projections(step.exec, space, block.rows);
    for_each_part([&](const SpaceTokens& part, const auto& state) {
      convolve_inputs(step.exec, space, own, part, state.before, state.after);
    });
  });
  if (space.config.is_mamba1()) derive_steps(step, layer, space, block.rows);
  step.locally([&] {
    for_each_part([&](const SpaceTokens& part, const auto& state) {
      update_state(step.exec, space, own, part, state.before, state.after);
    });
  });
  finish(step, space, own, block);
  return block.outputs;
}

// Mamba-1: B, C and steps of x. Channels of a group may be on several ranks, which add up their
// parts of its latents.
void StateSpaceBlock::derive_steps(Step& step, int layer, const StateSpace& space,
                                   const Matrix& rows) {
  const auto& weights = step.weights(layer);
  const std::int64_t size = space.config.latents(), rank = space.config.step_rank;
  const std::int64_t state_dim = space.config.state_dim;
  const Matrix latents(m_latents.data(), rows.extent(0), space.config.groups * size);
  step.locally([&] {
    clear(step.exec, latents);
    std::int64_t first = 0;
    for (const auto& group : weights.space_groups) {
      step.linear(step.exec, columns_of_space(rows, first, group.latents.inputs()), group.latents,
                  {}, columns_of_space(latents, group.number * size, size));
      first += group.latents.inputs();
    }
  });
  step.exchange.sum(step.exec, step.comm, latents);
  step.locally([&] {
    std::int64_t first = space.steps(), index = 0;
    for (const auto& group : weights.space_groups) {
      const Matrix own = columns_of_space(latents, group.number * size, size);
      const auto norm = [&](std::int64_t begin, std::int64_t count) {
        const Matrix part = columns_of_space(own, begin, count);
        const linalg::ConstVector weight =
            Kokkos::subview(weights.latent_norm, range(begin, begin + count));
        add_and_norm(step.exec, part, Matrix(),
                     {weight, static_cast<float>(step.config.rms_norm_eps)}, part,
                     linalg::RoundedRows());
      };
      if (space.config.norms_latents) {
        norm(0, rank);
        norm(rank, state_dim);
        norm(rank + state_dim, state_dim);
      }
      place_inputs(step.exec, space, index++, own, rows);
      step.linear(step.exec, columns_of_space(own, 0, rank), group.steps, {},
                  columns_of_space(rows, first, group.steps.outputs()));
      first += group.steps.outputs();
    }
  });
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
                static_cast<float>(space.config.norm_eps.value_or(step.config.rms_norm_eps)));
  });
  if (space.config.gating == Gating::norm_before_gate) gate();
}

}  // namespace kvzap::engine
