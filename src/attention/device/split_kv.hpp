// Decode attention on a device: one query token per sequence, the rows of every head split over
// teams.
#pragma once

#include <kvzap/attention.hpp>

#include "linalg/gemm.hpp"

namespace kvzap::detail {

/// Softmax attention of one query token for each of several sequences, in two kernels. In the first
/// a team has a part of 128 rows of one KV head, reads each of their keys and values once for all
/// query heads of the group (up to 8 at a time), and leaves their largest score, the sum of their
/// weights and the weighted sums of values. The second merges the parts of each query head,
/// exactly. Parts depend on the head's own length alone, so a sequence's result does not depend on
/// others. Queries, exponentials and sums are float. Runs on any backend, and waits for nothing.
template <class Value, PageOrder order>
class SplitKV {
 public:
  using Layer = typename Attention<Value, order>::Layer;
  using QueryView = typename Attention<Value, order>::QueryView;
  using RowsView = typename Attention<Value, order>::RowsView;
  using OutputView = typename Attention<Value, order>::OutputView;

  /// queries, output: (sequence, query head, dim). Sequence b sees all rows of cached[b], and rows
  /// b * new_rows .. (b + 1) * new_rows - 1 of new_keys and new_values, (row, KV head,
  /// dim). At least one sequence and one KV head.
  void operator()(const ExecutionSpace& exec, const Layer* cached, std::int64_t sequences,
                  std::int64_t new_rows, const QueryView& queries, const RowsView& new_keys,
                  const RowsView& new_values, const OutputView& output);

 private:
  Vector m_partials;
};

}  // namespace kvzap::detail
