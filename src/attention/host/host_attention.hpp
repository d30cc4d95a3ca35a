// Attention of a mix of spans on the host: one queue of work for all threads.
#pragma once

#include <vector>

#include "attention/call.hpp"

namespace kvzap::attention {

/// Cuts spans of one query token into items of 1,024 rows of a KV head (RowAttention), whose
/// partial softmaxes merge exactly at the end. Cuts longer spans, and all spans if `by_tiles`, into
/// tiles of query tokens of a KV head (FlashPrefill). Threads take items from one queue: tiles
/// first, the largest first. The cuts of a span depend on that span alone. Waits for `exec` at the
/// start. With AMX and rows of 16 bits, AmxPrefill replaces FlashPrefill. It also replaces
/// RowAttention if a KV head has 8 query heads or more. Items of packed rows have no other rows:
/// PackedAttention takes them, and FlashPrefill in tiles.
template <class Value>
class HostAttention {
 public:
  using Span = AttentionSpan;

  /// Computes attention of the spans with one query token. If FlashPrefill is available (avx2),
  /// computes longer spans too; otherwise leaves them out.
  void operator()(const ExecutionSpace& exec, const std::vector<Span>& spans,
                  const AttentionCall<Value>& call, bool by_tiles);

  void reserve(const AttentionExtents& extents, bool by_tiles);
  static std::size_t scratch_bytes(const AttentionExtents& extents, bool by_tiles);

 private:
  using Call = AttentionCall<Value>;
  struct Tile {
    std::int64_t rows;  // rows that its last token sees
    std::int64_t first_token;
    std::int64_t tokens;
    int span;
    int head;
    bool by_amx;
  };
  /// Rows [begin, end) of a head, all of them packed or none.
  struct RowItem {
    std::int64_t begin;
    std::int64_t end;
    int span;
    int head;
    bool packed;
  };
  struct Items;
  struct Sizes {
    std::int64_t partials, workspaces;  // floats
    std::int64_t tiles, row_items, singles;
  };
  static Sizes sizes_of(const AttentionExtents& extents, bool by_tiles);
  static std::int64_t partial_size(int group, int dim) { return std::int64_t{group} * (dim + 2); }

  void plan(const std::vector<Span>& spans, const Call& call, bool by_tiles);
  void plan_rows(int span, int head, std::int64_t begin, std::int64_t end, bool packed);
  void run(const std::vector<Span>& spans, const Call& call);
  void merge(const std::vector<Span>& spans, const Call& call);

  std::vector<Tile> m_tiles;  // those of AMX first
  std::vector<RowItem> m_row_items;
  std::vector<int> m_singles;               // spans that are cut into row items
  std::vector<std::int64_t> m_first_items;  // of each (single, head), and the end
  Kokkos::View<float*, Kokkos::HostSpace> m_partials;
  Kokkos::View<float*, Kokkos::HostSpace> m_workspaces;
};

}  // namespace kvzap::attention
