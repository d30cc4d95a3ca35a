// Inputs of each layer from a second embedding of the token.
#pragma once

#include "base/staged.hpp"
#include "engine/mixers.hpp"

namespace kvzap::engine {

/// Computes what each layer adds to its output (LayerInputsConfig). A rank has some columns of the
/// tables, with their rows of the gates and columns of the last map; so one sum over ranks
/// completes an output.
class LayerInputsBlock final : public LayerBlock {
 public:
  void reserve(Step& step) override;
  void begin(Step& step) override;
  void release() override;
  /// Keeps the embedding of the step's tokens, before any layer has changed it.
  void take_embedding(Step& step);
  /// Sets y (row, hidden_size) to this rank's part of a layer's output before its norm, for the
  /// rows of Step::h, the input of the gates.
  void run(Step& step, int layer, const RowRange& rows, const linalg::Matrix& y);

 private:
  linalg::Vector m_embedding;   // (token, hidden_size)
  base::Staged<TokenId> m_ids;  // (token): 0 where the tables have no row
  linalg::Vector m_projected, m_table, m_gates, m_joined;
};

}  // namespace kvzap::engine
