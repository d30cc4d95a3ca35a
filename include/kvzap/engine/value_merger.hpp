// What rows that stay take up of the rows that a cut evicts: the part of a policy after its choice.
#pragma once

#include <cstdint>
#include <functional>
#include <kvzap/core/types.hpp>
#include <memory>
#include <vector>

namespace kvzap {

/// One head's rows, in order of position, when a cut has chosen those that stay.
struct CutHead {
  using Rows = Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace>;

  ExecutionSpace exec;
  int layer = 0;
  int head = 0;  // index in the model
  /// (row, head_dim), after RoPE at their own positions. Empty with PolicyChoice::sums_attention.
  Rows keys;
  Rows values;  // (row, head_dim), padded with zeros behind the values' dimensions
  /// (row), on the host: 1 where the row stays.
  const std::uint8_t* keep = nullptr;
  // With PolicyChoice::sums_attention, on the host. Null otherwise.
  const std::int64_t* positions = nullptr;  // (row)
  const float* scores = nullptr;            // (row): by which the budget has chosen
  /// (row): the sum over the steps after the context of the probabilities that the last token of
  /// the step gives the row, summed over the query heads of the group.
  const float* attention = nullptr;
  std::int64_t steps = 0;  // since the context or the last cut

  std::int64_t rows() const { return static_cast<std::int64_t>(values.extent(0)); }
};

/// The new values of some of the rows that stay.
struct MergedValues {
  std::vector<std::int64_t> rows;  // ascending
  /// (at least rows.size(), head_dim)
  Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace> values;
};

/// Changes the values of rows that stay in a cut, by the rows that it evicts. Keys, positions and
/// the choice itself remain. The engine calls it once for each head of a cut, on the rank that has
/// the head, so that no result may depend on other heads. It rounds the new values once, to the
/// type in which the cache has the row.
class ValueMerger {
 public:
  ValueMerger() = default;
  ValueMerger(const ValueMerger&) = delete;
  ValueMerger& operator=(const ValueMerger&) = delete;
  virtual ~ValueMerger() = default;

  /// Returns the values that differ. Kernels on head.exec may still write them. Valid until the
  /// next call. `head` has at least one row that stays and one that goes.
  virtual const MergedValues& merge(const CutHead& head) = 0;
};

/// Makes a merger for one cut, or for one layer of it.
using MergerMaker = std::function<std::unique_ptr<ValueMerger>()>;

}  // namespace kvzap
