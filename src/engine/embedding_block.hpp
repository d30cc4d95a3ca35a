// The embedding of a step's tokens.
#pragma once

#include "engine/step.hpp"

namespace kvzap::engine {

class EmbeddingBlock {
 public:
  void reserve(Step& step) { base::reserve_scratch(m_ids, step.tokens(), "kvzap::decoder::ids"); }
  /// Sets the residual stream Step::h. Each rank fills the rows of its part of the vocabulary; the
  /// sum over ranks completes them. Collective.
  void run(Step& step);
  void release() { m_ids = decltype(m_ids)(); }

 private:
  Kokkos::View<TokenId*, MemorySpace> m_ids;
};

}  // namespace kvzap::engine
