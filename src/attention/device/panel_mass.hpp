// Attention mass on a device: scores by batched products over all heads.
#pragma once

#include "attention/mass_call.hpp"
#include "linalg/gemm.hpp"

namespace kvzap::attention {

/// Works on a tile of query tokens and one panel of rows of every head at a time, as PanelAttention
/// does. One batched product computes the scores. The probabilities of each column are then
/// reduced, first over 64 query rows and then over all. Runs on any backend and does not wait.
class PanelMass {
 public:
  void operator()(const ExecutionSpace& exec, const AttentionSpan& span, const MassCall& call);

 private:
  template <class Value>
  void compute(const ExecutionSpace& exec, const AttentionSpan& span, const MassCall& call);

  // Values of the type of the rows:
  Kokkos::View<std::uint8_t*, MemorySpace> m_queries;  // (head, query row, dim)
  Kokkos::View<std::uint8_t*, MemorySpace> m_keys;     // (head, row, dim)
  linalg::Vector m_scores;                             // (head, query row, row)
  linalg::Vector m_unscale;                            // (head, query row)
  linalg::Vector m_partial;                            // (slice of query rows, head, row)
};

}  // namespace kvzap::attention
