// The pages that decode steps read, chosen on a device: what host/page_choice does on hosts.
#pragma once

#include <vector>

#include "attention/call.hpp"
#include "base/staged.hpp"
#include "linalg/gemm.hpp"

namespace kvzap::attention {

/// What the kernels of a span that chooses read and write.
struct ChoosingSpan {
  const std::uintptr_t* metadata;  // by page id
  const PageId* pages;             // (head, page), rows of pages_stride
  std::int64_t pages_stride;
  const std::int64_t* retained;  // (head)
  const float* queries;          // of the span's token
  float* scores;                 // (head, full)
  PageId* listed;                // (head, width)
  std::int64_t* listed_rows;     // (head)
  ReadPages read;
  std::int32_t full, width;  // bounds of a head's full pages, and of those that it reads
};

/// Gives spans layers that list chosen pages alone (AttentionSpan::read_pages), so that the kernels
/// of split_kv need not know of the choice. Two kernels: bounds of the scores of all full pages,
/// then the choice of a head's pages by the bits of these scores. A call launches them for each
/// span that chooses, a planned call once for all. Waits only when scratch space has to grow.
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

  /// Attention::plan_calls and the functions after it. plan() returns the spans as a call does, and
  /// needs scratch space that reserve() has made.
  void plan_calls(std::size_t calls);
  const std::vector<AttentionSpan>& plan(std::size_t number,
                                         const std::vector<AttentionSpan>& spans,
                                         const AttentionCall& call);
  void copy_plans(const ExecutionSpace& exec);
  void run_planned(const ExecutionSpace& exec, std::size_t number) const;
  /// Adds what decides the launches of the planned calls.
  void add_shape(std::vector<std::int64_t>& shape) const;

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
    std::int64_t full, width;  // see ChoosingSpan
    Sizes first;
  };
  /// The launches of a planned call, whose spans are in m_choosing from `first` on.
  struct Planned {
    std::size_t first = 0;
    int count = 0;
    std::int64_t blocks = 0;  // of pages, of each head
    AttentionCall call;
    PageFormat format;
    int page_rows = 1;
  };
  static Sizes sizes_of(const AttentionExtents& extents);
  void reserve(const Sizes& sizes);
  /// Lists the spans that choose in m_places. Returns the scratch space that they need.
  Sizes find_choosing(const std::vector<AttentionSpan>& spans, int kv_heads);
  /// Lets the span of m_spans see its chosen pages. Returns what its kernels read.
  ChoosingSpan let_choose(const Place& place, const AttentionCall& call);
  void pad_plans();

  std::vector<AttentionSpan> m_spans;
  std::vector<Place> m_places;
  std::vector<std::int64_t> m_bounds;  // (span, head): of the rows that are read
  std::vector<Planned> m_planned;      // (number)
  std::vector<std::int64_t> m_padded;  // (number): blocks of the step before
  std::vector<ChoosingSpan> m_choosing;
  base::Staged<ChoosingSpan> m_staged;
  linalg::Vector m_scores;
  Kokkos::View<PageId*, MemorySpace> m_table;
  Kokkos::View<std::int64_t*, MemorySpace> m_retained;
};

}  // namespace kvzap::attention
