// Attention of new tokens over a ragged layer of the cache and over each other.
#pragma once

#include <kvzap/core/array_view.hpp>
#include <kvzap/core/ragged_layer.hpp>
#include <kvzap/core/read_pages.hpp>
#include <memory>
#include <vector>

namespace kvzap {

namespace attention {
struct AttentionCall;
struct Kernels;
}  // namespace attention

/// The implementation that computes attention. All give the same result up to rounding.
enum class AttentionPath {
  automatic,  // rows for spans of one query token, flash_prefill for longer spans
  rows,       // spans of one query token: one pass over a KV head's rows for all query heads of its
              // group
  flash_prefill,  // any number of query tokens: tiles of scores and weighted sums, online softmax
  split_kv,       // the form of `rows` for devices: a kernel over parts of every head's rows; runs
                  // anywhere
  panels,         // the form of `flash_prefill` for devices: batched products over all heads; runs
                  // anywhere
  portable        // plain loops that run on any backend; the reference for the others
};

/// One sequence's part of a call: consecutive query tokens and the rows that they see.
struct AttentionSpan {
  /// Cached rows; every query of the span sees all of them.
  CachedLayer cached;
  /// The queries are rows first_query .. first_query + queries - 1 of the call's `queries` and
  /// `output`.
  std::int64_t first_query = 0;
  std::int64_t queries = 1;
  /// The new rows are rows first_new .. first_new + new_rows - 1 of the call's `new_keys` and
  /// `new_values`. The queries belong to the last `queries` of these rows. Each query sees the new
  /// rows up to its own. Without new rows the queries see cached rows only.
  std::int64_t first_new = 0;
  std::int64_t new_rows = 1;
  /// If above 0, each query sees only the last `window` of these rows, its own among them; `cached`
  /// then has no rows. A span of one query needs no window: its new rows are those that it sees.
  std::int64_t window = 0;
  /// The full pages that the span's query sees, of a span of one query whose layer has bounds;
  /// other spans see all. A page's bound is the largest score that a key between its bounds can
  /// have with a query of the group. Those with the largest bounds are read, the earlier one of
  /// equal ones, and those whose bound is not a number.
  ReadPages read_pages = {};

  /// Returns how many of the new rows query i of the span sees if there is no window.
  std::int64_t seen_new_rows(std::int64_t i) const {
    return new_rows > 0 ? new_rows - queries + i + 1 : 0;
  }
};

/// (token, query head): natural logarithm of the sum of exp over the scaled scores that a query
/// sees.
using LogSumExpView = Kokkos::View<float**, Kokkos::LayoutStride, MemorySpace>;

/// Settings of a call of Attention, and an output that it may have.
struct AttentionOptions {
  AttentionPath path = AttentionPath::automatic;
  LogSumExpView lse = {};  // (M, query head), an output; empty if it is not needed
  /// If above 0, scaled scores s become soft_cap * tanh(s / soft_cap), within 4 units in the last
  /// place.
  float soft_cap = 0;
};

/// Upper bounds on the extents of calls of Attention, for Attention::reserve.
struct AttentionExtents {
  int kv_heads = 0;              // of any layer
  int group = 1;                 // query heads per KV head
  int head_dim = 1;              // dimensions of a head
  std::int64_t spans = 0;        // spans of one call
  std::int64_t tokens = 0;       // query tokens of all spans of one call
  std::int64_t single_rows = 0;  // rows that all heads of all spans of one query token see together
  std::int64_t longest_single = 0;  // rows that one head of such a span sees
  PageFormat format = {};           // of the layers' pages
  int chosen_page_rows = 0;         // of a page if spans have read_pages; otherwise 0
};

/// Softmax attention (scaled by 1/sqrt(head_dim)) with grouped query heads, for any mix of spans in
/// one call. The object holds scratch space and reuses it. A call allocates only if it needs more
/// than earlier calls and `reserve` have taken.
///
/// Precision, relative to the largest |value| that a query sees: products and sums are accumulated
/// in float, and exp is accurate to 2 units in the last place. For scores of order 1 the result is
/// within 1e-5 of exact arithmetic over the stored rows.
///
/// bfloat16 rows on processors with a dot product of bfloat16 pairs: the paths flash_prefill and
/// rows round queries and exponentials to bfloat16, each by at most 2^-9 of its value. Weights are
/// normalized by the sum of the rounded exponentials. The result is then within 2 (2^-9 + d), where
/// d = 2^-9 sum_i |q_i k_i| / sqrt(head_dim) bounds the change of the scores. For scores of order 1
/// this is within 2^-7. With AMX, weights exceed 1 before they are normalized: sums of values
/// beyond 2^80 may overflow.
///
/// half rows on processors with AMX: flash_prefill rounds queries and exponentials, and so does
/// rows where a KV head has 8 query heads or more. AMX's products of half round them by 2^-11, as
/// panels does. AMX with bfloat16 products alone rounds them by 2^-17, and each product by as much
/// again.
///
/// The path panels rounds queries and exponentials to the type of the rows: by the bounds above for
/// bfloat16, and with 2^-11 instead of 2^-9 for half. The path split_kv rounds neither. The tensor
/// cores of NVIDIA's GPUs, which the other paths use for 16-bit rows there, round as panels does
/// for spans of several queries; for one query they use two terms, within 2^-18. The log-sum-exp is
/// computed from the scores and exponentials that the path uses, so the same bounds hold for it.
///
/// Values that are not finite have the same effect on every path. A score (the product of a query
/// and a key) of -infinity has weight 0. A query whose scores are all -infinity gives the output 0
/// and the log-sum-exp -infinity. A score that is NaN or +infinity makes the output and the
/// log-sum-exp of its query head NaN. So a NaN in a query reaches only that query head's output,
/// and a NaN in a key reaches every query that sees its row, and no other. Values are multiplied by
/// their weights even where a weight is 0. So a NaN in a value reaches exactly the queries that see
/// its row, in its dimension, and an infinite value makes the same elements infinite or NaN. (One
/// exception: on the path panels, queries of a span with a window may also get NaN from such a
/// value of a row that has just left their window.)
class Attention {
 public:
  using Layer = CachedLayer;
  using Span = AttentionSpan;
  using QueryView = Kokkos::View<const float***, Kokkos::LayoutStride, MemorySpace>;
  using OutputView = Kokkos::View<float***, Kokkos::LayoutStride, MemorySpace>;

  /// For keys and values of this type.
  explicit Attention(DType dtype);
  ~Attention();

  /// Computes attention of every span's query tokens over the rows that they see. The part of one
  /// span does not depend, bit for bit, on the other spans of the call or on the number of threads.
  ///
  /// queries: (M, query head, dim), after RoPE, unscaled. Query head q reads KV head q / group.
  /// new_keys, new_values: (C, KV head, dim), views of any layout, with the same strides.
  /// output: (M, query head, dim).
  ///
  /// The layers of all spans have the same heads and head_dim. Rows of queries and output that
  /// belong to no span are left unchanged. A span may have no queries. A span with one query, one
  /// new row and a filled cache is a decode step. A span with as many new rows as queries and an
  /// empty cache is dense causal attention.
  /// Throws Error if extents, types or spans do not fit, if a span has a window and cached rows or
  /// a single query, or if the path is rows or split_kv and a span has more than one query token.
  /// Throws Error if a span does not read all pages and the path is panels or portable.
  void operator()(const ExecutionSpace& exec, const std::vector<Span>& spans,
                  const QueryView& queries, const ConstArrayView& new_keys,
                  const ConstArrayView& new_values, const OutputView& output,
                  const AttentionOptions& options = {});

  /// Computes one span: M query tokens over all rows that `cached` holds and over the C new rows up
  /// to their own. The queries belong to the last M new rows, so C >= M.
  void operator()(const ExecutionSpace& exec, const Layer& cached, const QueryView& queries,
                  const ConstArrayView& new_keys, const ConstArrayView& new_values,
                  const OutputView& output, const AttentionOptions& options = {});

  /// Computes one decode step of B sequences. Row b of the output is the attention of query row b
  /// over all rows that cached[b] holds and over new row b, the newest of the sequence.
  void decode(const ExecutionSpace& exec, const std::vector<Layer>& cached,
              const QueryView& queries, const ConstArrayView& new_keys,
              const ConstArrayView& new_values, const OutputView& output,
              const AttentionOptions& options = {});

  /// Calls in two parts, for steps whose launches are recorded and repeated.
  ///
  /// plan_calls forgets the plans of the step before and makes room for `calls`. plan prepares a
  /// call of spans of one query token each, as the operator takes them; copy_plans brings the
  /// places of all rows to the device, and run_planned launches a call: again and again with the
  /// same arguments, as long as the views, the memory of the caches and planned_shape stay the
  /// same. The cache may change between plan and run_planned by KVCache::plan_append alone. Throws
  /// the errors of the operator, and Error for spans that read some pages unless reserve() has
  /// made room for their extents.
  void plan_calls(std::size_t calls);
  void plan(std::size_t number, const std::vector<Span>& spans, const QueryView& queries,
            const ConstArrayView& new_keys, const ConstArrayView& new_values,
            const OutputView& output, const AttentionOptions& options = {});
  void copy_plans(const ExecutionSpace& exec);
  void run_planned(const ExecutionSpace& exec, std::size_t number);
  /// Adds the numbers that decide the planned calls' launches to `shape`.
  void add_planned_shape(std::vector<std::int64_t>& shape) const;
  /// Returns whether calls of up to these extents can be planned: on devices, if their parts fit
  /// one launch.
  static bool can_plan(const AttentionExtents& extents,
                       AttentionPath path = AttentionPath::automatic);

  /// Allocates scratch space for calls of up to these extents with this path. Such calls then
  /// allocate nothing.
  void reserve(const AttentionExtents& extents, AttentionPath path = AttentionPath::automatic);
  /// Returns the bytes that `reserve` allocates for these extents if nothing was reserved before.
  static std::size_t scratch_bytes(DType dtype, const AttentionExtents& extents,
                                   AttentionPath path = AttentionPath::automatic);

 private:
  attention::AttentionCall checked_call(const std::vector<Span>& spans, const QueryView& queries,
                                        const ConstArrayView& new_keys,
                                        const ConstArrayView& new_values, const OutputView& output,
                                        const AttentionOptions& options) const;

  DType m_dtype;
  std::unique_ptr<attention::Kernels> m_kernels;
  std::vector<Span> m_spans;  // of the overloads that take one span
};

}  // namespace kvzap
