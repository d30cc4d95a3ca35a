#include "engine/embedding_block.hpp"

#include "engine/step_kernels.hpp"

namespace kvzap::engine {

void EmbeddingBlock::begin(Step& step) {
  step.locally([&] {
    std::copy(step.batch().tokens().begin(), step.batch().tokens().end(), m_ids.host());
    m_ids.copy(step.exec, step.tokens());
    if (!step.deferred) base::fence(step.exec, "kvzap::decoder: the host may write ids again");
  });
}

void EmbeddingBlock::run(Step& step) {
  const Model::Weights& weights = step.model.weights();
  auto multiplier = static_cast<float>(step.config.embedding_multiplier);
  if (step.config.rounds_embedding_multiplier) {
    multiplier = with_value_type(step.model.dtype(), [&](auto zero) {
      return static_cast<float>(static_cast<decltype(zero)>(multiplier));
    });
  }
  step.locally([&] {
    embed(step.exec, m_ids.device(), weights.embedding, weights.first_token, step.h);
    if (multiplier != 1) scale(step.exec, step.h, multiplier);
    if (weights.positions.size() > 0) {
      add_positions(step.exec, step.h, weights.positions, step.positions);
    }
  });
  step.exchange.sum(step.exec, step.comm, step.h);
  if (weights.embedding_norm.weight.extent(0) == 0) return;
  step.locally([&] {
    add_and_norm(step.exec, step.h, {}, norm_of(step.config, weights.embedding_norm), step.h, {});
  });
}

}  // namespace kvzap::engine
