// Sums over ranks of what lies in execution-space memory.
#pragma once

#include <kvzap/communicator.hpp>

#include "detail/gemm.hpp"
#include "detail/kokkos_compat.hpp"

namespace kvzap::detail {

/// values = sum of every rank's values, in place; contiguous. Collective.
inline void all_reduce_sum(const ExecutionSpace& exec, const Communicator& comm,
                           const Matrix& values) {
  if (comm.size() == 1) return;
  fence(exec, "kvzap::all_reduce: MPI reads what the instance wrote");
  auto host = Kokkos::create_mirror_view(values);
  Kokkos::deep_copy(host, values);
  comm.all_reduce_sum(host.data(), host.size());
  Kokkos::deep_copy(values, host);
}

}  // namespace kvzap::detail
