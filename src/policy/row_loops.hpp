// Loops over rows, and memory that hosts and kernels share, for modifiers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/host_threads.hpp"
#include "base/kokkos_compat.hpp"
#include "base/machine.hpp"
#include "base/scratch.hpp"
#include "linalg/gemm.hpp"
#include "policy/row_math.hpp"

namespace kvzap::policy {

/// Calls work(i) for 0 <= i < n, on the host's threads or as a kernel.
template <class Work>
void each_row(const ExecutionSpace& exec, const char* label, std::int64_t n, const Work& work) {
  constexpr std::int64_t together = 64;  // rows that one work item takes on a host
  if (base::machine().on_host()) {
    base::host_for(label, (n + together - 1) / together, [=](std::int64_t part) {
      const std::int64_t end = std::min(n, (part + 1) * together);
      for (std::int64_t i = part * together; i < end; ++i) work(i);
    });
    return;
  }
  Kokkos::parallel_for(label, PolicyRange(exec, 0, n), work);
}

/// to(i, :) = from(rows[i], :), for all rows of `to`.
template <class Index>
void gather_rows(const ExecutionSpace& exec, const char* label, const linalg::ConstMatrix& from,
                 const Index* rows, const linalg::Matrix& to) {
  const auto dim = static_cast<std::int64_t>(to.extent(1));
  const std::int64_t items = (dim + columns_per_item - 1) / columns_per_item;
  Kokkos::parallel_for(
      label, PolicyRange(exec, 0, static_cast<std::int64_t>(to.extent(0)) * items),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t first = i % items * columns_per_item;
        const std::int64_t end = first + columns_per_item < dim ? first + columns_per_item : dim;
        const float* const source = &from(rows[i / items], 0);
        float* const target = &to(i / items, 0);
        for (std::int64_t d = first; d < end; ++d) target[d] = source[d];
      });
}

/// Memory of kernels, with a copy on the host.
template <class Value>
class Mirrored {
 public:
  void reserve(std::int64_t count, const char* label) {
    if (static_cast<std::int64_t>(m_values.extent(0)) >= count) return;
    m_host = {};
    base::reserve_scratch(m_values, count, label);
    m_host = Kokkos::create_mirror_view(m_values);
  }
  Value* device() const { return m_values.data(); }
  Value* host() const { return m_host.data(); }
  void to_kernels(const ExecutionSpace& exec) const { Kokkos::deep_copy(exec, m_values, m_host); }
  void to_host(const ExecutionSpace& exec) const { Kokkos::deep_copy(exec, m_host, m_values); }

 private:
  Kokkos::View<Value*, MemorySpace> m_values;
  base::HostMirror<Kokkos::View<Value*, MemorySpace>> m_host;
};

}  // namespace kvzap::policy
