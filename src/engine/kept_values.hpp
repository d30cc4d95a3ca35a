// Rows that stay take up values of rows that a cut evicts, layer by layer.
#pragma once

#include <kvzap/core/array_view.hpp>
#include <kvzap/core/cache.hpp>
#include <kvzap/engine/value_merger.hpp>
#include <memory>
#include <vector>

#include "base/kokkos_compat.hpp"

namespace kvzap::engine {

/// The rows of a layer of one sequence at a cut, and which of them stay.
struct CutRows {
  int layer = 0;
  std::vector<int> heads;  // on this rank: index of each head in the model
  /// (head on this rank, row), rows by position. Columns after a head's rows are ignored.
  Kokkos::View<const std::uint8_t**, Kokkos::LayoutRight, MemorySpace> keep;
  /// (row, head, dim): the rows of a step of which append_kept has stored those that stay. Absent:
  /// the rows are the sequence's own, and none has gone yet.
  ConstArrayView new_keys, new_values;
  /// For mergers that read CutHead::attention. Absent otherwise.
  Kokkos::View<const float**, Kokkos::LayoutStride, MemorySpace> scores = {};    // (head, row)
  Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace> attention = {};  // (head, row)
  std::int64_t steps = 0;                                                        // see CutHead
};

/// Lets a ValueMerger work on the heads of a layer, one after the other: gathers their rows as
/// floats, and writes the new values. Keeps that memory. Communicates nothing. Waits.
class KeptValues {
 public:
  /// `make` may be empty: values then stay as they are.
  explicit KeptValues(const MergerMaker& make) : m_merger(make ? make() : nullptr) {}

  /// Call it after append_kept for new rows, and before KVCache::evict for a sequence's own. Throws
  /// OutOfMemory, and what the merger throws.
  void merge(const ExecutionSpace& exec, KVCache& cache, SequenceId sequence, const CutRows& cut);

 private:
  void merge_head(const ExecutionSpace& exec, KVCache& cache, SequenceId sequence,
                  const CutRows& cut, int head);

  std::unique_ptr<ValueMerger> m_merger;
  Kokkos::View<float*, MemorySpace> m_keys, m_values;
  Kokkos::View<std::int64_t*, MemorySpace> m_numbers;
  base::HostMirror<Kokkos::View<std::int64_t*, MemorySpace>> m_host_numbers;
};

}  // namespace kvzap::engine
