#include "engine/layer_inputs_block.hpp"

#include <cmath>

#include "base/launch.hpp"
#include "engine/step_kernels.hpp"
#include "engine/stream_kernels.hpp"

namespace kvzap::engine {

using linalg::Matrix;

void LayerInputsBlock::reserve(Step& step) {
  const std::int64_t m = step.most_rows(), hidden = step.config.hidden_size;
  const std::int64_t size = step.config.layer_inputs->size;
  const std::int64_t own = step.model.weights().layers.front().inputs.gate.outputs();
  base::reserve_scratch(m_embedding, step.tokens() * hidden, "kvzap::decoder::inputs");
  m_ids.reserve(step.tokens(), "kvzap::decoder::input_ids");
  base::reserve_scratch(m_projected, m * size, "kvzap::decoder::inputs");
  for (linalg::Vector* const rows : {&m_table, &m_gates}) {
    base::reserve_scratch(*rows, m * own, "kvzap::decoder::inputs");
  }
  base::reserve_scratch(m_joined, 2 * m * own, "kvzap::decoder::inputs");
}

void LayerInputsBlock::release() {
  m_embedding = m_projected = m_table = m_gates = m_joined = {};
  m_ids.release();
}

void LayerInputsBlock::begin(Step& step) {
  step.locally([&] {
    for (std::int64_t i = 0; i < step.tokens(); ++i) {
      const TokenId id = step.batch().tokens()[i];
      m_ids.host()[i] = id < step.config.layer_inputs->vocab_size ? id : 0;
    }
    m_ids.copy(step.exec, step.tokens());
    if (!step.deferred) base::fence(step.exec, "kvzap::decoder: the host may write ids again");
  });
}

void LayerInputsBlock::take_embedding(Step& step) {
  const Matrix to(m_embedding.data(), step.tokens(), step.config.hidden_size);
  base::launch([exec = step.exec, to, from = step.h] { Kokkos::deep_copy(exec, to, from); });
}

void LayerInputsBlock::run(Step& step, int layer, const RowRange& rows, const Matrix& y) {
  const ExecutionSpace& exec = step.exec;
  const auto& weights = step.weights(layer).inputs;
  const std::int64_t m = rows.count(), hidden = step.config.hidden_size;
  const std::int64_t size = step.config.layer_inputs->size, own = weights.gate.outputs();
  const Matrix x(m_embedding.data() + rows.begin * hidden, m, hidden);
  const Matrix h = Kokkos::subview(step.h, range(rows.begin, rows.end), Kokkos::ALL);
  const Matrix projected(m_projected.data(), m, size), table(m_table.data(), m, own);
  const Matrix gates(m_gates.data(), m, own), joined(m_joined.data(), m, 2 * own);
  step.linear(exec, x, {}, weights.projection, {}, projected);
  scale(exec, projected, static_cast<float>(1 / std::sqrt(static_cast<double>(hidden))));
  add_and_norm(exec, projected, Matrix(),
               norm_of(step.config, {step.model.weights().inputs_norm, {}}), projected, {});
  embed(exec, Kokkos::subview(m_ids.device(), range(rows.begin, rows.end)), weights.table, 0,
        table);
  step.linear(exec, h, {}, weights.gate, {}, gates);
  const auto [first, end] = even_range(size, step.comm.size(), step.comm.rank());
  // As the embedding's multiplier, in the type of the weights.
  const float table_scale = with_value_type(step.model.dtype(), [&](auto zero) {
    return static_cast<float>(
        static_cast<decltype(zero)>(static_cast<float>(std::sqrt(static_cast<double>(size)))));
  });
  join_inputs(exec, {gates, projected, table, first, table_scale, std::sqrt(0.5f)}, joined);
  activate(exec, joined, gates, {}, {Activation::gelu_tanh});
  step.linear(exec, gates, {}, weights.out, {}, y);
}

}  // namespace kvzap::engine
