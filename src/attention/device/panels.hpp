// Prefill attention on a device: matrix products over all heads at once.
#pragma once

#include "attention/call.hpp"
#include "linalg/gemm.hpp"

namespace kvzap::attention {

/// Softmax attention of many query tokens. It works on one tile of tokens and one panel of rows of
/// every head at a time. It gathers the panel's keys and values and computes scores by one batched
/// product. Then it updates a running softmax, and adds weighted sums by another product.
///
/// Operands have the type of the rows (16-bit types use tensor cores), so queries and exponentials
/// are rounded to it. Rows of half queries are first scaled by powers of two, as in LinearMap. If
/// only some queries of a tile see a row and its values are not finite, the row is left out of the
/// product and added for those queries. Scratch space does not grow with the number of rows or
/// tokens. Runs on any backend and does not wait.
class PanelAttention {
 public:
  using Span = AttentionSpan;

  /// Computes one span of any number of query tokens.
  void operator()(const ExecutionSpace& exec, const Span& span, const AttentionCall& call);

  void reserve(DType dtype, const AttentionExtents& extents);
  static std::size_t scratch_bytes(DType dtype, const AttentionExtents& extents);

 private:
  template <class Value>
  void attend(const ExecutionSpace& exec, const Span& span, const AttentionCall& call);

  using Bytes = Kokkos::View<std::uint8_t*, MemorySpace>;  // of values of the type of the rows
  Bytes m_queries;  // (head, query row, dim); a query row is a token and a query head of the group
  Bytes m_keys;     // (head, row, dim)
  Bytes m_values;   // (head, row, dim)
  Bytes m_weights;  // (head, query row, row); not of float: there a weight replaces its score
  linalg::Vector m_scores;  // (head, query row, row)
  linalg::Vector m_sums;    // (head, query row, dim)
  linalg::Vector
      m_rows;  // of each query row: maximum, weight, and the factor that undoes its scaling
  // (head, own token): whether a value is not finite; then (head): whether any of its values is.
  Kokkos::View<int*, MemorySpace> m_flags;
};

}  // namespace kvzap::attention
