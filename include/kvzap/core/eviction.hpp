// The rules that decide from a score whether a key-value pair is evicted.
#pragma once

#include <cmath>
#include <kvzap/core/types.hpp>

namespace kvzap {

/// KVzap's rule (arXiv 2601.07891, section 3): once a pair has left the sliding window, it is
/// evicted if its predicted log KVzip+ score is below the threshold. A rule without a threshold
/// keeps every pair.
///
///     EvictionRule rule;
///     rule.threshold = -4;  // from now on, pairs that score below -4 are evicted
struct EvictionRule {
  /// Log score below which a pair is evicted. NaN: there is no threshold, and every pair stays.
  float threshold = NAN;
  /// The first `sink` positions are never evicted (attention sinks).
  std::int64_t sink = 0;
  /// Set it to false to keep every pair in spite of a threshold.
  bool judge = true;

  /// Returns the rule that keeps every pair.
  static EvictionRule keep_all() { return {}; }

  /// Returns whether pairs are judged and counted as judged. -inf judges pairs, and keeps them all.
  KOKKOS_INLINE_FUNCTION bool judges() const {
    return judge && (base::float_bits(threshold) & 0x7fffffffu) <= 0x7f800000u;
  }

  /// Returns whether the pair at `position` stays. A NaN or infinite score keeps its pair: a
  /// surrogate that breaks down must not cost the model its context.
  KOKKOS_INLINE_FUNCTION bool keeps(float score, std::int64_t position) const {
    // Avoids branches: kept and evicted pairs alternate at random, so branches would be
    // mispredicted. No score is below NaN.
    return static_cast<bool>(static_cast<int>(!judge) | static_cast<int>(position < sink) |
                             static_cast<int>(!is_finite(score)) |
                             static_cast<int>(!(score < threshold)));
  }

  KOKKOS_INLINE_FUNCTION static bool is_finite(float score) {
    return (base::float_bits(score) & 0x7f800000u) != 0x7f800000u;
  }
};

/// A second verdict on the rows of a head, by score. Rows with a score above `score` stay. Of the
/// rows with a score equal to it, the `ties` oldest stay. Rows with NaN or infinite scores stay and
/// are counted.
struct Cutoff {
  float score = 0;
  std::int64_t ties = 0;
};

/// Rows that are exempt from cutoffs.
struct EvictOptions {
  /// Rows at positions below this stay.
  std::int64_t sink = 0;
  /// The rows of this many newest tokens stay.
  std::int64_t recent = 0;
};

}  // namespace kvzap
