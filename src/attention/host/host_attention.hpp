// Attention of a mix of spans on the host: one queue of work for all threads.
#pragma once

#include <vector>

#include "attention/call.hpp"

namespace kvzap::detail {

/// Spans of one query token are cut into items of 1,024 rows of a KV head, whose partial softmaxes
/// merge exactly in the end (RowAttention). Longer ones, and all if `by_tiles`, are cut into tiles
/// of query tokens of a KV head (FlashPrefill). Threads take items from one queue, tiles first, the
/// largest of them first. How a span is cut depends on itself alone. Waits for `exec` at the start.
/// With AMX and rows of 16 bits, AmxPrefill takes the place of FlashPrefill, and, where the pages
/// are token-major and a KV head has 8 query heads or more, that of RowAttention.
template <class Value, PageOrder order>
class HostAttention {
 public:
  using Span = AttentionSpan<Value, order>;

  /// Attends the spans that have one query token, or, by tiles, any. Those with more need the
  /// instruction set avx2 and are left out where FlashPrefill is not available.
  void operator()(const ExecutionSpace& exec, const std::vector<Span>& spans,
                  const AttentionCall<Value, order>& call, bool by_tiles);

  void reserve(const AttentionExtents& extents, bool by_tiles);
  static std::size_t scratch_bytes(const AttentionExtents& extents, bool by_tiles);

 private:
  struct Tile {
    std::int64_t rows;  // that its last token sees
    std::int64_t first_token;
    std::int64_t tokens;
    int span;
    int head;
  };
  /// Rows [begin, end) of a head.
  struct RowItem {
    std::int64_t begin;
    std::int64_t end;
    int span;
    int head;
  };
  struct Sizes {
    std::int64_t partials, workspaces;  // floats
    std::int64_t tiles, row_items, singles;
  };
  static Sizes sizes_of(const AttentionExtents& extents, bool by_tiles);
  static std::int64_t partial_size(int group, int dim) { return std::int64_t{group} * (dim + 2); }

  std::vector<Tile> m_tiles;
  std::vector<RowItem> m_row_items;
  std::vector<int> m_singles;               // spans that are cut into row items
  std::vector<std::int64_t> m_first_items;  // of each (single, head), and the end
  Kokkos::View<float*, Kokkos::HostSpace> m_partials;
  Kokkos::View<float*, Kokkos::HostSpace> m_workspaces;
};

}  // namespace kvzap::detail
