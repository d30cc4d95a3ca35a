#include "engine/delta_net_block.hpp"

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
  }
}

Matrix DeltaNetBlock::run(Step& step, int layer, const RowRange& rows, const Matrix& x) {
  const auto& weights = step.weights(layer);
  const DeltaNet net = net_of(step, layer);
  DeltaTokens block;
  block.rows = step.matrix(Step::projected, rows.count(), net.columns());
  block.rates = Matrix(m_rates.data(), rows.count(), net.rates());
  block.outputs = step.matrix(Step::mixed, rows.count(), net.values());
  step.locally([&] {
    step.linear(step.exec, x, step.rounded, weights.delta_in, {}, block.rows);
    step.linear(step.exec, x, step.rounded, weights.delta_rates, {}, block.rates);
    // (nvcc 13 does not compile these braces as an argument.)
    const DeltaWeights own{
        weights.convolution, weights.delta_decay_rates, weights.delta_decay_shifts,
        weights.delta_norm,
        static_cast<float>(net.config.norm_eps.value_or(step.config.rms_norm_eps))};
    step.for_each_span(rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
      const SequenceId sequence = step.spans()[s].sequence;
      const auto state = step.cache.state(step.exec, sequence, layer);
      pass_delta_net(step.exec, net, own, block.part(begin - rows.begin, end - rows.begin),
                     state.before, state.after);
      step.cache.count_tokens(sequence, layer, end - begin);
    });
  });
  return block.outputs;
}

}  // namespace kvzap::engine
