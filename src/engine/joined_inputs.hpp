// The input of attention in layers with a shared block: the residual stream beside the embedding.
#pragma once

#include "engine/mixers.hpp"

namespace kvzap::engine {

class JoinedInputs final : public LayerBlock {
 public:
  void reserve(Step& step) override;
  void release() override { m_embedding = {}; }
  /// Keeps the embedding of the step's tokens, before any layer has changed it.
  void take_embedding(const Step& step);
  /// Sets x (row, 2 hidden_size) to the residual stream, then the embedding, of these rows.
  void join(const Step& step, const RowRange& rows, const linalg::Matrix& x) const;

 private:
  linalg::Vector m_embedding;  // (token, hidden_size)
};

}  // namespace kvzap::engine
