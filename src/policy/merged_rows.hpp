// Sums of kept and evicted values of a head, for the modifiers merge and cam.
#pragma once

#include <algorithm>
#include <cstdint>
#include <kvzap/engine/value_merger.hpp>
#include <vector>

#include "base/host_threads.hpp"
#include "base/kokkos_compat.hpp"
#include "base/machine.hpp"
#include "base/scratch.hpp"
#include "policy/row_math.hpp"

namespace kvzap::policy {

using MergeFloats = Kokkos::View<float*, MemorySpace>;

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

/// An evicted row, whose value a kept one takes up.
struct MergeEntry {
  std::int32_t kept = 0;  // number among the rows that stay
  std::int32_t gone = 0;  // row
  float weight = 0;
};

/// Adds values of evicted rows to those of kept ones. Keeps its memory.
class MergedRows {
 public:
  /// With v the value of a kept row, and w(e) and v(e) the weights and values of its entries,
  /// returns v + sum w(e) v(e), or with `is_mean` this over 1 + sum w(e), for the kept rows that
  /// have entries. Sums run in the order of the entries, in float.
  ///
  /// kept: (count_kept), the rows that stay, on the host. room: memory of the result, which grows
  /// to (kept row with entries, dim).
  const MergedValues& add(const CutHead& head, const std::vector<MergeEntry>& entries,
                          const std::int32_t* kept, std::int64_t count_kept, bool is_mean,
                          MergeFloats& room);

 private:
  // Entries begins(t) … begins(t + 1) - 1 are those of target t.
  Mirrored<std::int32_t> m_targets, m_begins, m_gone;
  Mirrored<float> m_weights;
  std::vector<std::int32_t> m_counts;
  MergedValues m_merged;
};

}  // namespace kvzap::policy
