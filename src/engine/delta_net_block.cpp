#include "engine/delta_net_block.hpp"

#include "engine/attention_gates.hpp"

namespace kvzap::engine {

using linalg::Matrix;

void DeltaNetBlock::reserve(Step& step) {
  const std::int64_t m = step.most_rows();
  for (int l = 0; l < static_cast<int>(step.config.num_hidden_layers); ++l) {
    if (step.config.layer(l).mixing != TokenMixing::delta_net) continue;
    const DeltaNet net = net_of(step, l);
    step.reserve(Step::mixed, m * net.values());
    step.reserve(Step::projected, m * net.columns());
    base::reserve_scratch(m_rates, m * net.rates(), "kvzap::decoder::delta_rates");
    base::reserve_scratch(m_latents, m * 2 * net.config.gate_rank, "kvzap::decoder::delta_latents");
    if (net.config.kind != DeltaNetConfig::Kind::lightning) continue;
    base::reserve_scratch(m_squares, 2 * m, "kvzap::decoder::squares");
  }
}

// The products of the input.
void DeltaNetBlock::project(Step& step, int layer, const Matrix& x, const DeltaNet& net,
                            const DeltaTokens& block, const Matrix& latents) {
  const auto& weights = step.weights(layer);
  const auto columns = [](const Matrix& matrix, std::int64_t begin, std::int64_t end) {
    return Kokkos::subview(matrix, Kokkos::ALL, range(begin, end));
  };
  const std::int64_t rank = net.config.gate_rank, heads = net.value_heads();
  // First the products of x: the others overwrite x rounded.
  step.linear(step.exec, x, step.rounded, weights.delta_latents, {}, latents);
  step.linear(step.exec, x, step.rounded, weights.delta_in, {},
              columns(block.rows, 0, weights.delta_in.outputs()));
  step.linear(step.exec, x, step.rounded, weights.delta_rates, {},
              columns(block.rates, 0, weights.delta_rates.outputs()));
  if (rank == 0) return;
  step.linear(step.exec, columns(latents, 0, rank), weights.delta_decays_out, {},
              columns(block.rates, heads, net.rates()));
  step.linear(step.exec, columns(latents, rank, 2 * rank), weights.delta_gates_out, {},
              columns(block.rows, net.gates(), net.columns()));
}

Matrix DeltaNetBlock::run(Step& step, int layer, const RowRange& rows, const Matrix& x) {
  const auto& weights = step.weights(layer);
  const DeltaNet net = net_of(step, layer);
  DeltaTokens block;
  block.rows = step.matrix(Step::projected, rows.count(), net.columns());
  block.rates = Matrix(m_rates.data(), rows.count(), net.rates());
  block.outputs = step.matrix(Step::mixed, rows.count(), net.values());
  const auto eps = static_cast<float>(net.config.norm_eps.value_or(step.config.rms_norm_eps));
  step.locally([&] {
    project(step, layer, x, net, block,
            Matrix(m_latents.data(), rows.count(), 2 * net.config.gate_rank));
    // (nvcc 13 does not compile these braces as an argument.)
    const DeltaWeights own{weights.convolution, weights.delta_decay_rates,
                           weights.delta_decay_shifts, weights.delta_norm, eps};
    step.for_each_span(rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
      const SequenceId sequence = step.spans()[s].sequence;
      const auto state = step.cache.state(step.exec, sequence, layer);
      pass_delta_net(step.exec, net, own, block.part(begin - rows.begin, end - rows.begin),
                     state.before, state.after);
    });
  });
  if (net.config.kind == DeltaNetConfig::Kind::lightning) {
    norm_inputs(step, block.outputs, weights.delta_norm, eps,
                net.config.value_heads * net.config.value_dim,
                Matrix(m_squares.data(), rows.count(), 2));
    step.locally([&] {
      const auto gates = range(net.gates(), net.columns());
      apply_gates(step.exec, Kokkos::subview(block.rows, Kokkos::ALL, gates), {}, block.outputs);
    });
  }
  return block.outputs;
}

}  // namespace kvzap::engine
