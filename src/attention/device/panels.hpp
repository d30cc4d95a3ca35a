// Prefill attention on a device: matrix products over all heads at once.
#pragma once

#include "attention/call.hpp"
#include "linalg/gemm.hpp"

namespace kvzap::attention {

/// Softmax attention of many query tokens. It works on one tile of tokens and one panel of rows of
/// every head at a time. It gathers the panel's keys and values and computes scores by one batched
/// product. Then it updates a running softmax, and adds weighted sums by another product.
///
/// Operands have the type Value (16-bit types use tensor cores), so queries and exponentials are
/// rounded to it. Rows of half queries are first scaled by powers of two, as in LinearMap. If only
/// some queries of a tile see a row and its values are not finite, the row is left out of the
/// product and added for those queries. Scratch space does not grow with the number of rows or
/// tokens. Runs on any backend and does not wait.
template <class Value>
class PanelAttention {
 public:
  using Span = AttentionSpan;

  /// Computes one span of any number of query tokens.
  void operator()(const ExecutionSpace& exec, const Span& span, const AttentionCall<Value>& call);

  /// Reserves scratch space for spans of up to `tokens` query tokens.
  void reserve(int kv_heads, int group, int dim, std::int64_t tokens);
  static std::size_t scratch_bytes(int kv_heads, int group, int dim, std::int64_t tokens);

 private:
  using Values = Kokkos::View<Value*, MemorySpace>;
  Values m_queries;  // (head, query row, dim); a query row is a token and a query head of the group
  Values m_keys;     // (head, row, dim)
  Values m_values;   // (head, row, dim)
  Values m_weights;  // (head, query row, row)
  linalg::Vector m_scores;  // (head, query row, row)
  linalg::Vector m_sums;    // (head, query row, dim)
  linalg::Vector
      m_rows;  // of each query row: maximum, weight, and the factor that undoes its scaling
  // (head, own token): whether a value is not finite; then (head): whether any of its values is.
  Kokkos::View<int*, MemorySpace> m_flags;
};

}  // namespace kvzap::attention
