// The attention that rows of a sequence receive after the context, summed from step to step.
#pragma once

#include <kvzap/engine/budget.hpp>
#include <kvzap/engine/policy.hpp>
#include <vector>

namespace kvzap::engine {

/// For each row of a sequence, the sum over the steps after the context of the probabilities that
/// the step's last token gives the row, summed over the query heads of the group. A cut keeps the
/// sums of the rows that stay. Memory: 8 bytes for each row.
class AttentionSums {
 public:
  /// (head on this rank, row): rows by position. Columns after a head's rows are 0.
  using Sums = Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>;

  explicit AttentionSums(int layers) : m_layers(layers) {}
  /// Returns a copy with its own memory, for a fork or a checkpoint.
  AttentionSums clone() const;
  /// Returns whether no step has been added.
  bool empty() const;

  /// Makes room for rows of a layer, so that `add` allocates nothing. Throws OutOfMemory.
  void reserve(const ExecutionSpace& exec, int layer, int heads, std::int64_t rows);
  /// Adds the attention of the step's last token, which only the step's last block has.
  void add(PolicyLayer& layer, const TokenBlock& block);
  /// Takes back what layers of a failed step have added. first: position of the step's first token.
  void cancel(const ExecutionSpace& exec, std::int64_t first);
  /// Returns the sums of a layer. Valid until its next `reserve`, `add` or `evict`.
  Sums sums(const ExecutionSpace& exec, int layer);
  /// Keeps the sums of the rows that stay in a cut.
  void evict(const ExecutionSpace& exec, const ScoredLayer& cut);

 private:
  struct Layer {
    Sums sums;                // of the steps before
    Sums step;                // of the newest step
    std::int64_t first = -1;  // position of that step's first token
  };

  std::vector<Layer> m_layers;
};

}  // namespace kvzap::engine
