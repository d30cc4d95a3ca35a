// Prefill attention on a device: matrix products over all heads at once.
#pragma once

#include <kvzap/attention.hpp>

#include "linalg/gemm.hpp"

namespace kvzap::detail {

/// Softmax attention of many query tokens, a tile of them at a time, over one panel of rows of
/// every head after the other: gather the panel's keys and values, scores by one batched product, a
/// running softmax, weighted sums by another. Operands are of type Value (16-bit ones use tensor
/// cores), so that queries and exponentials are rounded to it; rows of half queries are scaled by
/// powers of two first, as LinearMap does. Scratch space does not grow with the number of rows or
/// tokens. Runs on any backend, and waits for nothing.
template <class Value, PageOrder order>
class PanelAttention {
 public:
  using Layer = typename Attention<Value, order>::Layer;
  using QueryView = typename Attention<Value, order>::QueryView;
  using RowsView = typename Attention<Value, order>::RowsView;
  using OutputView = typename Attention<Value, order>::OutputView;

  /// As Attention::operator(), with at least one query token and one KV head.
  void operator()(const ExecutionSpace& exec, const Layer& cached, const QueryView& queries,
                  const RowsView& new_keys, const RowsView& new_values, const OutputView& output);

 private:
  using Values = Kokkos::View<Value*, MemorySpace>;
  Values m_queries;  // (head, query row, dim); a query row is a token and a head of the group
  Values m_keys;     // (head, row, dim)
  Values m_values;   // (head, row, dim)
  Values m_weights;  // (head, query row, row)
  Vector m_scores;   // (head, query row, row)
  Vector m_sums;     // (head, query row, dim)
  Vector m_rows;     // of each query row: maximum, weight, and what undoes its scaling
};

}  // namespace kvzap::detail
