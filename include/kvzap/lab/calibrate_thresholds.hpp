// How much of texts a surrogate's thresholds evict, and which threshold evicts how much.
#pragma once

#include <cstdint>
#include <kvzap/core/communicator.hpp>
#include <kvzap/engine/learn_from_texts.hpp>
#include <kvzap/engine/scorer.hpp>
#include <kvzap/engine/thresholds.hpp>
#include <memory>
#include <vector>

namespace kvzap {

/// The evict ratios of texts as functions of the threshold. What a dense prefill scores does not
/// depend on what is evicted, so that one run of a text gives its whole curve.
///
/// Each rank has the scores of its KV heads: of a text all of them, sorted, or, if they are many,
/// `most_scores` that are evenly spaced in their order; between those it interpolates, and counts
/// are wrong by 1 / most_scores of a rank's pairs at most.
class EvictRatioCurves {
 public:
  /// pairs_per_token: layers * KV heads, over all ranks.
  EvictRatioCurves(std::int64_t pairs_per_token, const Communicator& comm,
                   std::int64_t most_scores = 16384);

  /// The next text, of so many tokens: finite scores of this rank's pairs that are judged, in any
  /// order. Throws Error for a text without tokens.
  void add_text(std::int64_t tokens, std::vector<float> scores);

  std::int64_t texts() const { return static_cast<std::int64_t>(m_texts.size()); }
  std::int64_t tokens() const;

  /// Of each text. Collective, as all that follows; the same on every rank.
  std::vector<double> evict_ratios(float threshold) const;
  /// Mean over texts.
  double mean(float threshold) const;
  /// The mean that a threshold above all scores reaches: windows and sinks stay.
  double largest() const;
  /// The threshold whose mean is nearest to `evict_ratio`, in the middle between the scores around
  /// it. Throws AgreedError if the ratio is not in (0, 1) or above largest(), and without texts.
  ThresholdTable::Row row(double evict_ratio) const;

 private:
  struct Text {
    std::int64_t tokens = 0;
    std::int64_t count = 0;  // of this rank's judged pairs
    std::vector<float> scores;
    std::int64_t rank_of(std::size_t i) const;
    std::int64_t below(float threshold) const;
  };
  std::vector<std::int64_t> evicted(float threshold) const;

  std::int64_t m_pairs_per_token;
  Communicator m_comm;
  std::int64_t m_most_scores;
  std::vector<Text> m_texts;
};

/// Which pairs of a context a threshold judges.
struct JudgedPairs {
  int window = 128;       // all but those of the last tokens
  std::int64_t sink = 0;  // and of the first positions
};

/// What score_texts has seen.
struct ScoredTexts {
  EvictRatioCurves curves;
  /// Judged pairs whose score is NaN or infinite, over all ranks: no threshold evicts them.
  std::int64_t non_finite_scores = 0;
};

/// Runs each text as a dense prefill, one after the other, and takes the scores of its judged
/// pairs. Of a text one layer's keys and values exist at a time, and nothing of it stays but its
/// curve. Collective: all ranks pass the same texts. Throws Error for an empty text, and what
/// Engine::step throws. `progress` gets "texts" and tokens.
template <class Value>
ScoredTexts score_texts(const std::shared_ptr<const Model<Value>>& model,
                        const std::shared_ptr<Scorer>& scorer,
                        const std::vector<std::vector<TokenId>>& texts, const JudgedPairs& judged,
                        const Communicator& comm, const ProgressCallback& progress = {});

}  // namespace kvzap
