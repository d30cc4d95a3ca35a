// Decode attention on a device: one query token per span, the rows of every head split over teams.
#pragma once

#include "attention/call.hpp"
#include "linalg/gemm.hpp"

namespace kvzap::detail {

/// Softmax attention of all spans of one query token, in two kernels. In the first a team has a
/// part of the rows of one KV head, reads each of their keys and values once for all query heads of
/// the group (up to 8 at a time), and leaves their largest score, the sum of their weights and the
/// weighted sums of values. The second merges the parts of each query head, exactly. A part has 128
/// rows, or, of heads of more than 65,536 rows, the multiple of that with which 512 parts suffice:
/// the head's own length alone decides, so a span's result does not depend on others. Queries,
/// exponentials and sums are float. Runs on any backend, and waits for nothing, unless its room for
/// parts has to grow.
template <class Value, PageOrder order>
class SplitKV {
 public:
  using Span = AttentionSpan<Value, order>;

  /// Attends the spans of one query token and passes over the others.
  void operator()(const ExecutionSpace& exec, const std::vector<Span>& spans,
                  const AttentionCall<Value, order>& call);

  /// With an upper bound that does not depend on the heads' lengths: some 64 MiB, or what one span
  /// needs (2 KiB x query heads x (head_dim + 2) at most).
  void reserve(const AttentionExtents& extents);
  static std::size_t scratch_bytes(const AttentionExtents& extents);

 private:
  Vector m_partials;
  // Where spans lie, if they are too many for a kernel's arguments.
  Kokkos::View<char*, MemorySpace> m_table;
};

}  // namespace kvzap::detail
