// Attention of new tokens over a ragged layer of the cache and over each other.
#pragma once

#include <kvzap/cache.hpp>
#include <memory>
#include <vector>

namespace kvzap {

namespace detail {
template <class Value, PageOrder order>
struct AttentionScratch;
}

/// Which implementation computes attention. All give the same result up to rounding.
enum class AttentionPath {
  automatic,      // rows for one query token, flash_prefill for more
  rows,           // one pass over the rows of a KV head for all query heads of its group; one query
                  // token
  flash_prefill,  // tiles of scores and weighted sums, online softmax; any number of query tokens
  split_kv,       // what rows is on devices: a kernel over parts of every head's rows; any backend
  panels,         // what flash_prefill is on devices: batched products over all heads; any backend
  portable        // plain loops that run on any backend; the reference of the others
};

/// Softmax attention (scaled by 1/sqrt(head_dim)) with grouped query heads. Holds scratch space
/// that repeated calls share: a call allocates only if it needs more than those before it.
///
/// Precision, relative to the largest |value| that a query sees: products and sums are accumulated
/// in float, exp is good to 2 units in the last place, and for scores of order 1 the result is
/// within 1e-5 of exact arithmetic over the stored rows. For bfloat16 rows on processors with a dot
/// product of bfloat16 pairs, the paths rows (for token-major pages) and flash_prefill round
/// queries and exponentials to bfloat16, each by at most 2^-9 of itself; weights are normalized by
/// the sum of the rounded ones. The result is then within 2 (2^-9 + d), where d = 2^-9 sum_i |q_i
/// k_i| / sqrt(head_dim) bounds how far the scores move; within 2^-7 for scores of order 1.
///
/// The path panels rounds queries and exponentials to the type of the rows: as above for bfloat16,
/// and for half with 2^-11 instead of 2^-9. The path split_kv rounds neither.
///
/// A score of -infinity weighs nothing. A NaN in a key reaches the queries that see its row. One in
/// a value may in the paths flash_prefill and panels also reach queries of the same tile that do
/// not see its row, since 0 times NaN is NaN.
template <class Value, PageOrder order>
class Attention {
 public:
  using Layer = CachedLayer<Value, order>;
  using QueryView = Kokkos::View<const float***, Kokkos::LayoutStride, MemorySpace>;
  using RowsView = Kokkos::View<const Value***, Kokkos::LayoutStride, MemorySpace>;
  using OutputView = Kokkos::View<float***, Kokkos::LayoutStride, MemorySpace>;

  Attention();
  ~Attention();

  /// output (token, query head, dim) = attention of M query tokens over all rows that `cached`
  /// holds and over the `chunk` rows up to their own.
  ///
  /// queries: (M, query head, dim), after RoPE, unscaled. Query head q reads KV head q / group.
  /// new_keys, new_values: (C, KV head, dim) with C >= M; the queries belong to the last M
  /// chunk tokens, and query i sees chunk rows 0 .. C - M + i. With C = M = 1 this is a decode
  /// step; with an empty cache it is dense causal attention. Throws Error on extents that do not
  /// fit, or if `path` is rows or split_kv and M > 1.
  void operator()(const ExecutionSpace& exec, const Layer& cached, const QueryView& queries,
                  const RowsView& new_keys, const RowsView& new_values, const OutputView& output,
                  AttentionPath path = AttentionPath::automatic);

  /// One decode step of B sequences: row b of the output = attention of query row b over all rows
  /// that cached[b] holds and over chunk row b, the sequence's own newest. Each row is bit for bit
  /// what a call for its sequence alone gives with the same path.
  ///
  /// queries, output: (B, query head, dim). new_keys, new_values: (B, KV head, dim). The layers
  /// have the same heads and head_dim. Throws Error on extents that do not fit.
  void decode(const ExecutionSpace& exec, const std::vector<Layer>& cached,
              const QueryView& queries, const RowsView& new_keys, const RowsView& new_values,
              const OutputView& output, AttentionPath path = AttentionPath::automatic);

 private:
  std::unique_ptr<detail::AttentionScratch<Value, order>> m_scratch;
};

}  // namespace kvzap
