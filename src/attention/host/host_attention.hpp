// Attention of a mix of spans on the host: one queue of work for all threads.
#pragma once

#include <vector>

#include "attention/call.hpp"
#include "attention/host/gemm_tiles.hpp"

namespace kvzap::attention {

/// Cuts spans of one query token into items of 1,024 rows of a KV head (RowAttention), whose
/// partial softmaxes merge exactly at the end. Cuts longer spans, and all spans if `by_tiles`, into
/// tiles of query tokens of a KV head (FlashPrefill). Threads take items from one queue: tiles
/// first, the largest first. The cuts of a span depend on that span alone. Waits for `exec` at the
/// start. With AMX and rows of 16 bits, AmxPrefill replaces FlashPrefill. It also replaces
/// RowAttention if a KV head has 8 query heads or more. Items of quantised rows have no other rows:
/// QuantisedAttention takes them, and FlashPrefill in tiles. Without AVX2, GemmTiles replaces
/// FlashPrefill, after the queue.
class HostAttention {
 public:
  using Span = AttentionSpan;

  void operator()(const ExecutionSpace& exec, const std::vector<Span>& spans,
                  const AttentionCall& call, bool by_tiles);

  void reserve(DType dtype, const AttentionExtents& extents, bool by_tiles);
  static std::size_t scratch_bytes(DType dtype, const AttentionExtents& extents, bool by_tiles);

  /// Tokens of a span and a KV head.
  struct Tile {
    std::int64_t rows;  // rows that its last token sees
    std::int64_t first_token;
    std::int64_t tokens;
    int span;
    int head;
    bool by_amx;
  };
  /// Rows [begin, end) of a head, all of them quantised or none.
  struct RowItem {
    std::int64_t begin;
    std::int64_t end;
    int span;
    int head;
    bool quantised;
  };

 private:
  struct Sizes {
    std::int64_t partials, workspaces;  // floats
    std::int64_t tiles, row_items, singles;
  };
  static Sizes sizes_of(DType dtype, const AttentionExtents& extents, bool by_tiles);

  void plan(const std::vector<Span>& spans, const AttentionCall& call, bool by_tiles);
  void plan_rows(int span, int head, std::int64_t begin, std::int64_t end, bool quantised);
  void run(const std::vector<Span>& spans, const AttentionCall& call);
  void merge(const std::vector<Span>& spans, const AttentionCall& call);

  std::vector<Tile> m_tiles;  // those of AMX first
  std::vector<RowItem> m_row_items;
  std::vector<int> m_singles;               // spans that are cut into row items
  std::vector<std::int64_t> m_first_items;  // of each (single, head), and the end
  Kokkos::View<float*, Kokkos::HostSpace> m_partials;
  Kokkos::View<float*, Kokkos::HostSpace> m_workspaces;
  GemmTiles m_gemm_tiles;
};

}  // namespace kvzap::attention
