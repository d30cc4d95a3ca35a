// How many pages of a head a decode step reads.
#pragma once

#include <Kokkos_Macros.hpp>
#include <cstdint>

namespace kvzap {

/// How many of a KV head's full pages a query token attends to: those that can have the largest
/// scores (Quest, Tang et al., arXiv 2406.10774). A head's last page if it is not full, its ring
/// and the new rows are always read.
struct ReadPages {
  /// Pages of each head; 0: `share` says how many.
  std::int64_t pages = 0;
  /// Of each head's full pages, in (0, 1]; 1: all.
  double share = 1;

  KOKKOS_INLINE_FUNCTION bool all() const { return pages == 0 && share >= 1; }
  /// Returns how many of `full` pages are read; of a share, rounded up.
  KOKKOS_INLINE_FUNCTION std::int64_t of(std::int64_t full) const {
    std::int64_t most = pages;
    if (pages == 0) {
      const double part = share * static_cast<double>(full);
      most = static_cast<std::int64_t>(part);
      if (static_cast<double>(most) < part) ++most;
    }
    return most < full ? most : full;
  }
  bool operator==(const ReadPages& other) const {
    return pages == other.pages && share == other.share;
  }
  bool operator!=(const ReadPages& other) const { return !(*this == other); }
};

}  // namespace kvzap
