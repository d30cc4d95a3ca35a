// Sums of kept and evicted values of a head, for the modifiers merge and cam.
#pragma once

#include <cstdint>
#include <kvzap/engine/value_merger.hpp>
#include <vector>

#include "policy/row_loops.hpp"

namespace kvzap::policy {

using MergeFloats = Kokkos::View<float*, MemorySpace>;

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
