// Attention mass on a device: scores by batched products over all heads.
#pragma once

#include "attention/mass_call.hpp"
#include "linalg/gemm.hpp"

namespace kvzap::detail {

/// A tile of query tokens at a time, over one panel of rows of every head after the other, as
/// PanelAttention has them: scores by one batched product, then the probabilities of each column
/// reduced, over 64 query rows first and then over all of them. Runs on any backend, and waits for
/// nothing.
template <class Value, PageOrder order>
class PanelMass {
 public:
  void operator()(const ExecutionSpace& exec, const AttentionSpan<Value, order>& span,
                  const MassCall<Value, order>& call);

 private:
  using Values = Kokkos::View<Value*, MemorySpace>;
  Values m_queries;  // (head, query row, dim)
  Values m_keys;     // (head, row, dim)
  Vector m_scores;   // (head, query row, row)
  Vector m_unscale;  // (head, query row)
  Vector m_partial;  // (slice of query rows, head, row)
};

}  // namespace kvzap::detail
