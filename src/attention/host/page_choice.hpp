// The pages that decode steps read, chosen by bounds of their scores.
#pragma once

#include <vector>

#include "attention/call.hpp"

namespace kvzap::attention {

/// Gives spans layers that list chosen pages alone (AttentionSpan::read_pages), so that kernels
/// need not know of the choice.
class PageChoice {
 public:
  /// Returns `spans`, or copies of them that see the chosen pages; they are valid until `release`
  /// or the next call. Waits for `exec` if there is a choice.
  const std::vector<AttentionSpan>& operator()(const ExecutionSpace& exec,
                                               const std::vector<AttentionSpan>& spans,
                                               const AttentionCall& call);
  /// Forgets the layers of the last call.
  void release() { m_spans.clear(); }

  void reserve(const AttentionExtents& extents);
  static std::size_t scratch_bytes(const AttentionExtents& extents);

 private:
  /// A KV head of a span. Its parts of the scratch space begin at these elements.
  struct Head {
    int span;
    int head;
    std::int64_t full, read;   // pages
    std::int64_t first_page;   // in m_scores and m_order: one element for each full page
    std::int64_t first_entry;  // in m_table: `width` elements, the same for all heads of a span
    std::int64_t width;
  };
  struct Sizes {
    std::int64_t heads, pages, entries, queries;
  };
  static Sizes sizes_of(const AttentionExtents& extents);

  bool chooses(const AttentionSpan& span) const;
  void list(int span, const AttentionSpan& of);
  void choose(std::int64_t i, const AttentionCall& call);
  void score(const Head& head, const AttentionCall& call, float* queries, float* scores) const;

  std::vector<AttentionSpan> m_spans;
  std::vector<Head> m_heads;
  std::vector<float> m_scores;
  std::vector<std::int32_t> m_order;
  std::vector<float> m_queries;          // of each head
  std::vector<PageId> m_table;           // (span, head, page)
  std::vector<std::int64_t> m_retained;  // (span, head)
};

}  // namespace kvzap::attention
