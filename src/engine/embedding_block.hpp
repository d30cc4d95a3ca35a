// The embedding of a step's tokens.
#pragma once

#include "base/staged.hpp"
#include "engine/step.hpp"

namespace kvzap::engine {

class EmbeddingBlock {
 public:
  void reserve(Step& step) { m_ids.reserve(step.tokens(), "kvzap::decoder::ids"); }
  /// Copies the ids of the step's tokens to the device.
  void begin(Step& step);
  /// Sets the residual stream Step::h. Each rank fills the rows of its part of the vocabulary; the
  /// sum over ranks completes them. Collective.
  void run(Step& step);
  void release() { m_ids.release(); }

 private:
  base::Staged<TokenId> m_ids;
};

}  // namespace kvzap::engine
