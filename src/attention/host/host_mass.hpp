// Attention mass on the host.
#pragma once

#include "attention/mass_call.hpp"
#include "linalg/gemm.hpp"

namespace kvzap::attention {

/// A work item is a tile of a KV head's keys with all queries. TileMass computes it; without AVX2,
/// gemm does, one tile after the other. Results do not depend on the number of threads. Waits for
/// `exec` at the start.
class HostMass {
 public:
  void operator()(const ExecutionSpace& exec, const AttentionSpan& span, const MassCall& call);

 private:
  void by_gemm(const ExecutionSpace& exec, const AttentionSpan& span, const MassCall& call);

  Kokkos::View<float*, Kokkos::HostSpace> m_workspaces;
  linalg::Vector m_queries;  // (query row, dim)
  linalg::Vector m_keys;     // (row, dim)
  linalg::Vector m_scores;   // (query row, row)
};

}  // namespace kvzap::attention
