// Prefill attention on a device: matrix products over all heads at once.
#pragma once

#include "attention/call.hpp"
#include "linalg/gemm.hpp"

namespace kvzap::detail {

/// Softmax attention of many query tokens, a tile of them at a time, over one panel of rows of
/// every head after the other: gather the panel's keys and values, scores by one batched product, a
/// running softmax, weighted sums by another. Operands are of type Value (16-bit ones use tensor
/// cores), so that queries and exponentials are rounded to it; rows of half queries are scaled by
/// powers of two first, as LinearMap does. Rows of values that are not finite and that some queries
/// of a tile do not see are kept out of the product and added for those that do. Scratch space does
/// not grow with the number of rows or tokens. Runs on any backend, and waits for nothing.
template <class Value, PageOrder order>
class PanelAttention {
 public:
  using Span = AttentionSpan<Value, order>;

  /// One span of any number of query tokens.
  void operator()(const ExecutionSpace& exec, const Span& span,
                  const AttentionCall<Value, order>& call);

  /// For spans of up to `tokens` query tokens.
  void reserve(int kv_heads, int group, int dim, std::int64_t tokens);
  static std::size_t scratch_bytes(int kv_heads, int group, int dim, std::int64_t tokens);

 private:
  using Values = Kokkos::View<Value*, MemorySpace>;
  Values m_queries;  // (head, query row, dim); a query row is a token and a head of the group
  Values m_keys;     // (head, row, dim)
  Values m_values;   // (head, row, dim)
  Values m_weights;  // (head, query row, row)
  Vector m_scores;   // (head, query row, row)
  Vector m_sums;     // (head, query row, dim)
  Vector m_rows;     // of each query row: maximum, weight, and what undoes its scaling
  // (head, own token): whether a value is not finite; then (head): whether one of its values is.
  Kokkos::View<int*, MemorySpace> m_flags;
};

}  // namespace kvzap::detail
