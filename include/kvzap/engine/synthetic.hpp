// Random scores and cache contents from a seed. They measure speed and memory without a trained
// surrogate or a long prefill.
#pragma once

#include <kvzap/core/cache.hpp>
#include <kvzap/core/head_partition.hpp>
#include <kvzap/engine/scorer.hpp>
#include <vector>

namespace kvzap {

/// Returns the keep ratio of each KV head of a layer, ascending. Their mean is 1 - evict_ratio.
/// With skew 1 all are equal. With skew s the largest is s times the smallest, geometrically spaced
/// between them. No ratio exceeds 1; if one would, the other heads make up the difference. Throws
/// Error unless n_heads >= 1, 0 <= evict_ratio <= 1 and skew >= 1.
std::vector<double> head_keep_ratios(int n_heads, double evict_ratio, double skew);

/// Evicts a random fraction `evict_ratio` of all pairs at threshold 0. The score of a pair depends
/// on seed, layer, KV head and position alone, so it is the same on any number of ranks. With skew
/// > 1 the heads of a layer keep unequal fractions (head_keep_ratios), assigned to heads in random
/// order.
class RandomScorer final : public Scorer {
 public:
  /// Throws Error as head_keep_ratios does, or if the partition has no such rank.
  RandomScorer(const HeadPartition& partition, int rank, double evict_ratio, double skew,
               std::uint64_t seed);
  void score(const ExecutionSpace& exec, int layer, const PositionView& positions,
             const InputView& hidden, const ScoreView& scores) override;
  std::string kind() const override { return "random"; }
  /// Returns the keep ratio of a KV head of the model. Throws Error if the layer or head does not
  /// exist.
  double keep_ratio(int layer, int kv_head) const;

 private:
  HeadPartition m_partition;
  int m_rank;
  std::vector<std::vector<double>> m_keep;  // (layer, KV head of the model)
  // (layer, head on this rank): the input of the kernel.
  Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> m_local_keep;
  Kokkos::View<std::uint64_t**, Kokkos::LayoutRight, MemorySpace> m_local_keys;
};

/// Appends `tokens` random rows (normal, standard deviation 1) to every head and layer of a
/// sequence, in chunks of 1024 tokens. `rule` judges them on scores of `scorer` (null: unscored).
/// The cache is then in the state that a prefill of the same length leaves, but for layers with a
/// state (StateShape), which keep theirs. Scorers that read the hidden state get zeros of width
/// hidden_size. Collective if the scorer is.
///
/// For speed, the rows of every chunk and layer are slices at random offsets of one pool of random
/// values. Rows of one chunk and layer share no value; rows of different ones can overlap or,
/// rarely, be equal. The same seed, shape and tokens give the same rows. Throws Error if `tokens`
/// or hidden_size is negative.
void fill_random(KVCache& cache, SequenceId sequence, std::int64_t tokens, Scorer* scorer,
                 std::int64_t hidden_size, const EvictionRule& rule, std::uint64_t seed);

}  // namespace kvzap
