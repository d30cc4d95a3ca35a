// Attention of new tokens over a ragged layer of the cache and over each other.
#pragma once

#include <kvzap/core/cache.hpp>
#include <memory>
#include <vector>

namespace kvzap {

namespace detail {
template <class Value, PageOrder order>
struct AttentionScratch;
}

/// Which implementation computes attention. All give the same result up to rounding.
enum class AttentionPath {
  automatic,      // for each span: rows if it has one query token, flash_prefill if it has more
  rows,           // one pass over the rows of a KV head for all query heads of its group; spans of
                  // one query token
  flash_prefill,  // tiles of scores and weighted sums, online softmax; any number of query tokens
  split_kv,       // what rows is on devices: a kernel over parts of every head's rows; any backend
  panels,         // what flash_prefill is on devices: batched products over all heads; any backend
  portable        // plain loops that run on any backend; the reference of the others
};

/// One sequence's part of a call: consecutive query tokens, and the rows that they see.
template <class Value, PageOrder order>
struct AttentionSpan {
  /// Every query of the span sees all rows of this.
  CachedLayer<Value, order> cached;
  /// Rows first_query .. first_query + queries - 1 of the call's `queries` and `output`.
  std::int64_t first_query = 0;
  std::int64_t queries = 1;
  /// Rows first_new .. first_new + new_rows - 1 of the call's `new_keys` and `new_values`. The
  /// queries belong to the last `queries` of them; each sees those up to its own.
  std::int64_t first_new = 0;
  std::int64_t new_rows = 1;
};

/// (token, query head): natural logarithm of the sum of exp of the scaled scores that a query sees.
using LogSumExpView = Kokkos::View<float**, Kokkos::LayoutStride, MemorySpace>;

/// What calls of Attention have at most, for Attention::reserve.
struct AttentionExtents {
  int kv_heads = 0;                 // of any layer
  int group = 1;                    // query heads of a KV head
  int head_dim = 1;                 // dimensions of a head
  std::int64_t spans = 0;           // of one call
  std::int64_t tokens = 0;          // query tokens of one call's spans together
  std::int64_t single_rows = 0;     // rows that all heads of all spans of one query token see
  std::int64_t longest_single = 0;  // rows that one head of such a span sees
};

/// Softmax attention (scaled by 1/sqrt(head_dim)) with grouped query heads, of any mix of spans in
/// one call. Holds scratch space that repeated calls share: a call allocates only if it needs more
/// than those before it, and `reserve`, have made room for.
///
/// Precision, relative to the largest |value| that a query sees: products and sums are accumulated
/// in float, exp is good to 2 units in the last place, and for scores of order 1 the result is
/// within 1e-5 of exact arithmetic over the stored rows. For bfloat16 rows on processors with a dot
/// product of bfloat16 pairs, the paths rows (for token-major pages) and flash_prefill round
/// queries and exponentials to bfloat16, each by at most 2^-9 of itself; weights are normalized by
/// the sum of the rounded ones. The result is then within 2 (2^-9 + d), where d = 2^-9 sum_i |q_i
/// k_i| / sqrt(head_dim) bounds how far the scores move; within 2^-7 for scores of order 1. With
/// AMX, weights exceed 1 before they are normalized: sums of values beyond 2^80 may overflow.
/// For half rows on processors with AMX, flash_prefill, and rows where a KV head has 8 query heads
/// or more, round queries and exponentials too: with AMX's products of half by 2^-11 (as panels
/// does), with those of bfloat16 alone by 2^-17, and as much again in each product.
///
/// The path panels rounds queries and exponentials to the type of the rows: as above for bfloat16,
/// and for half with 2^-11 instead of 2^-9. The path split_kv rounds neither. The log-sum-exp is
/// that of the scores and exponentials that the path uses: it is off by the same bounds.
///
/// What is not finite means the same on every path. A score (a product of a query and a key) of
/// -infinity weighs nothing; a query all of whose scores are -infinity gives 0, and -infinity for
/// its log-sum-exp. A score that is NaN or +infinity makes output and log-sum-exp of its query head
/// NaN: a NaN in a query reaches that query head's output, one in a key every query that sees its
/// row, and no other. Values are multiplied by their weights even where those are 0: a NaN in a
/// value reaches exactly the queries that see its row, in its dimension, and an infinite value
/// makes the same elements infinite or NaN.
template <class Value, PageOrder order>
class Attention {
 public:
  using Layer = CachedLayer<Value, order>;
  using Span = AttentionSpan<Value, order>;
  using QueryView = Kokkos::View<const float***, Kokkos::LayoutStride, MemorySpace>;
  using RowsView = Kokkos::View<const Value***, Kokkos::LayoutStride, MemorySpace>;
  using OutputView = Kokkos::View<float***, Kokkos::LayoutStride, MemorySpace>;

  Attention();
  ~Attention();

  /// output (token, query head, dim) = attention of every span's query tokens over the rows that
  /// they see. What a span gets does not depend, bit for bit, on the other spans of the call, nor
  /// on the number of threads.
  ///
  /// queries: (M, query head, dim), after RoPE, unscaled. Query head q reads KV head q / group.
  /// new_keys, new_values: (C, KV head, dim), with the same strides. The layers have the same heads
  /// and head_dim. Rows of queries and output that belong to no span are left alone; a span may
  /// have no queries. With one query, one new row and a filled cache a span is a decode step; with
  /// as many new rows as queries and an empty cache it is dense causal attention.
  /// lse: (M, query head), or empty if nobody asks.
  /// Throws Error on extents or spans that do not fit, or if `path` is rows or split_kv and a span
  /// has more than one query token.
  void operator()(const ExecutionSpace& exec, const std::vector<Span>& spans,
                  const QueryView& queries, const RowsView& new_keys, const RowsView& new_values,
                  const OutputView& output, AttentionPath path = AttentionPath::automatic,
                  const LogSumExpView& lse = {});

  /// The same for one span: M query tokens over all rows that `cached` holds and over the C new
  /// rows up to their own; the queries belong to the last M of these, C >= M.
  void operator()(const ExecutionSpace& exec, const Layer& cached, const QueryView& queries,
                  const RowsView& new_keys, const RowsView& new_values, const OutputView& output,
                  AttentionPath path = AttentionPath::automatic, const LogSumExpView& lse = {});

  /// The same for one decode step of B sequences: row b of the output = attention of query row b
  /// over all rows that cached[b] holds and over new row b, the sequence's own newest.
  void decode(const ExecutionSpace& exec, const std::vector<Layer>& cached,
              const QueryView& queries, const RowsView& new_keys, const RowsView& new_values,
              const OutputView& output, AttentionPath path = AttentionPath::automatic,
              const LogSumExpView& lse = {});

  /// Makes room for calls of up to these extents with this path: those allocate nothing.
  void reserve(const AttentionExtents& extents, AttentionPath path = AttentionPath::automatic);
  /// Bytes that reserve takes for them, if nothing was reserved before.
  static std::size_t scratch_bytes(const AttentionExtents& extents,
                                   AttentionPath path = AttentionPath::automatic);

 private:
  std::unique_ptr<detail::AttentionScratch<Value, order>> m_scratch;
};

}  // namespace kvzap
