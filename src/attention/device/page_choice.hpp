// The pages that decode steps read, chosen on a device: what host/page_choice does on hosts.
#pragma once

#include <vector>

#include "attention/call.hpp"
#include "linalg/gemm.hpp"

namespace kvzap::attention {

/// Gives spans layers that list chosen pages alone (AttentionSpan::read_pages), so that the kernels
/// of split_kv need not know of the choice. Two kernels for each span that chooses: bounds of the
/// scores of all full pages, then the choice of a head's pages by the bits of these scores.
/// Waits only when scratch space has to grow.
class DevicePageChoice {
 public:
  /// Returns `spans`, or copies of them that see the chosen pages; they are valid until `release`
  /// or the next call.
  const std::vector<AttentionSpan>& operator()(const ExecutionSpace& exec,
                                               const std::vector<AttentionSpan>& spans,
                                               const AttentionCall& call);
  /// Forgets the layers of the last call.
  void release() { m_spans.clear(); }

  void reserve(const AttentionExtents& extents);
  static std::size_t scratch_bytes(const AttentionExtents& extents);

 private:
  /// Elements of the scratch space.
  struct Sizes {
    std::int64_t pages = 0;    // (span, head, full page)
    std::int64_t entries = 0;  // (span, head, chosen page)
    std::int64_t heads = 0;    // (span, head)
  };
  /// A span's part of the scratch space begins at these elements.
  struct Place {
    int span;
    std::int64_t full, width;  // bounds of a head's full pages, and of those that it reads
    Sizes first;
  };
  static Sizes sizes_of(const AttentionExtents& extents);
  void reserve(const Sizes& sizes);
  void choose(const ExecutionSpace& exec, const Place& place, const AttentionCall& call);

  std::vector<AttentionSpan> m_spans;
  std::vector<Place> m_places;
  std::vector<std::int64_t> m_bounds;  // (span, head): of the rows that are read
  linalg::Vector m_scores;
  Kokkos::View<PageId*, MemorySpace> m_table;
  Kokkos::View<std::int64_t*, MemorySpace> m_retained;
};

}  // namespace kvzap::attention
