// Scores and cache contents made up from a seed, to measure speed and memory without a trained
// surrogate or a long prefill.
#pragma once

#include <kvzap/core/cache.hpp>
#include <kvzap/core/head_partition.hpp>
#include <kvzap/engine/scorer.hpp>
#include <vector>

namespace kvzap {

/// Keep ratio of each of a layer's KV heads, ascending. Their mean is 1 - evict_ratio. With skew 1
/// all are equal; with skew s the largest is s times the smallest, geometrically spaced between, as
/// far as no head keeps more than everything (then the others make up for it). Throws Error unless
/// n_heads >= 1, 0 <= evict_ratio <= 1 and skew >= 1.
std::vector<double> head_keep_ratios(int n_heads, double evict_ratio, double skew);

/// Evicts a random `evict_ratio` of all pairs at threshold 0. The score of a pair depends on seed,
/// layer, KV head and position alone, so that it is the same on any number of ranks. With skew > 1
/// the heads of a layer keep unequal shares (head_keep_ratios), dealt to heads in a random order.
class RandomScorer final : public Scorer {
 public:
  /// Throws Error as head_keep_ratios does, or if the partition has no such rank.
  RandomScorer(const HeadPartition& partition, int rank, double evict_ratio, double skew,
               std::uint64_t seed);
  void score(const ExecutionSpace& exec, int layer, const PositionView& positions,
             const InputView& hidden, const ScoreView& scores) override;
  std::string kind() const override { return "random"; }
  /// Keep ratio of a KV head of the model. Throws Error if there is no such layer or head.
  double keep_ratio(int layer, int kv_head) const;

 private:
  HeadPartition m_partition;
  int m_rank;
  std::vector<std::vector<double>> m_keep;  // (layer, KV head of the model)
  // What the kernel reads of the heads of this rank, (layer, head).
  Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> m_local_keep;
  Kokkos::View<std::uint64_t**, Kokkos::LayoutRight, MemorySpace> m_local_keys;
};

/// Appends `tokens` random rows (normal, standard deviation 1) to every head and layer of a
/// sequence, in chunks of 1024 tokens, judged by `rule` on scores of `scorer` (absent: unscored).
/// Leaves the cache as a prefill of as many tokens would. Scorers that look at the hidden state are
/// given zeros of width hidden_size. Collective if the scorer is.
///
/// So that this takes little longer than copying the rows, the rows of every chunk and layer are
/// cut at random places out of one pool of random values: those of one chunk and layer
/// have no value in common, those of different ones can overlap or, rarely, coincide. The same
/// seed, shape and tokens give the same rows. Throws Error if `tokens` or hidden_size is negative.
template <class Value, PageOrder order>
void fill_random(KVCache<Value, order>& cache, SequenceId sequence, std::int64_t tokens,
                 Scorer* scorer, std::int64_t hidden_size, const EvictionRule& rule,
                 std::uint64_t seed);

}  // namespace kvzap
