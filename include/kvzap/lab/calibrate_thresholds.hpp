// The evict ratios of texts that a surrogate's thresholds give.
#pragma once

#include <cstdint>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/head_partition.hpp>
#include <kvzap/engine/learn_from_texts.hpp>
#include <kvzap/engine/scorer.hpp>
#include <kvzap/engine/thresholds.hpp>
#include <memory>
#include <vector>

namespace kvzap {

/// Evict ratios of texts as functions of the threshold. Scores of a dense prefill do not depend on
/// evictions, so one run of a text gives its whole curve.
///
/// Each rank keeps the sorted scores of its KV heads. If a head has more than `most_scores` scores
/// of a text, the rank keeps `most_scores` of them, evenly spaced in their order, and interpolates.
/// Counts are then wrong by at most 1 / most_scores of the pairs. They do not depend on the number
/// of ranks.
class EvictRatioCurves {
 public:
  /// Finite scores of judged pairs, in any order, for each KV head of this rank: layer by layer, in
  /// the order of HeadPartition::heads. Heads without judged pairs have an empty list.
  using ScoresOfHeads = std::vector<std::vector<float>>;

  /// pairs_per_token: layers * KV heads, over all ranks.
  EvictRatioCurves(std::int64_t pairs_per_token, const Communicator& comm,
                   std::int64_t most_scores = 1024);

  /// Adds a text of `tokens` tokens. Throws Error for a text without tokens.
  void add_text(std::int64_t tokens, ScoresOfHeads scores);

  std::int64_t texts() const { return static_cast<std::int64_t>(m_texts.size()); }
  std::int64_t tokens() const;

  /// Returns the evict ratio of each text. Collective, like the functions below; the same on every
  /// rank.
  std::vector<double> evict_ratios(float threshold) const;
  /// Returns the mean evict ratio over texts.
  double mean(float threshold) const;
  /// Returns the mean of a threshold above all scores: it evicts all but windows and sinks.
  double largest() const;
  /// Returns the rows of all texts that the threshold keeps: [layer][KV head], as
  /// HeadPartition::balanced takes them. All texts must have the heads of `partition`.
  std::vector<std::vector<std::int64_t>> kept_rows(const HeadPartition& partition,
                                                   float threshold) const;
  /// Returns the threshold whose mean is nearest to `evict_ratio`, halfway between the two scores
  /// around it. Throws AgreedError if the ratio is not in (0, 1) or is above largest(), and if
  /// there are no texts.
  ThresholdTable::Row row(double evict_ratio) const;

 private:
  struct Head {
    std::int64_t count = 0;  // of its judged pairs
    std::vector<float> scores;
    std::int64_t rank_of(std::size_t i) const;
    std::int64_t below(float threshold) const;
  };
  struct Text {
    std::int64_t tokens = 0;
    std::vector<Head> heads;  // of this rank
  };
  std::vector<std::int64_t> evicted(float threshold) const;

  std::int64_t m_pairs_per_token;
  Communicator m_comm;
  std::int64_t m_most_scores;
  std::vector<Text> m_texts;
};

/// The pairs of a context that a threshold does not judge. It judges all others.
struct JudgedPairs {
  std::vector<int> windows = {128};  // the most recent tokens; one curve for each number
  std::int64_t sink = 0;             // the first positions
};

/// Result of score_texts.
struct ScoredTexts {
  std::vector<EvictRatioCurves> curves;  // one for each of JudgedPairs::windows
  /// Pairs judged with the smallest window whose score is NaN or infinite, over all ranks: no
  /// threshold evicts them.
  std::int64_t non_finite_scores = 0;
};

/// Runs each text as a dense prefill, one after the other, and adds the scores of its judged pairs
/// to the curve of each window.
/// The keys and values of one layer exist at a time. `progress` receives "texts" and tokens.
/// Collective: all ranks pass the same texts. Throws Error for an empty text, and without a window,
/// and the errors of
/// Engine::step.
ScoredTexts score_texts(const std::shared_ptr<const Model>& model,
                        const std::shared_ptr<Scorer>& scorer,
                        const std::vector<std::vector<TokenId>>& texts, const JudgedPairs& judged,
                        const Communicator& comm, const ProgressCallback& progress = {});

}  // namespace kvzap
