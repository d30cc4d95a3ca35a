// Selection of the largest scores by sorting all of them, for tests of select_top.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <kvzap/core/selection.hpp>
#include <vector>

namespace kvzap::test {

/// A segment on the host.
struct Head {
  std::vector<float> scores;
  std::int64_t pool;
  std::int64_t order;
};

inline ScoreSegment segment_of(const Head& head) {
  const Kokkos::View<float*, MemorySpace> scores("scores", head.scores.size());
  const auto host = Kokkos::create_mirror_view(scores);
  std::copy(head.scores.begin(), head.scores.end(), host.data());
  Kokkos::deep_copy(scores, host);
  return {scores, head.pool, head.order};
}

/// Which rows of a head a cutoff lets stay, as KVCache::evict reads it.
inline std::vector<bool> stay_by_cutoff(const Head& head, const Cutoff& cutoff) {
  std::vector<bool> stay;
  std::int64_t ties = 0;
  for (const float score : head.scores) {
    stay.push_back(!std::isfinite(score) || score > cutoff.score ||
                   (score == cutoff.score && ties++ < cutoff.ties));
  }
  return stay;
}

/// Which rows of each head stay, by a sort of all rows of a pool.
inline std::vector<std::vector<bool>> stay_by_sorting(const std::vector<Head>& heads,
                                                      const std::vector<std::int64_t>& keep) {
  struct Row {
    bool is_finite;
    float score;
    std::int64_t order;
    std::size_t position;
    std::size_t head;
  };
  std::vector<std::vector<bool>> stay;
  for (const Head& head : heads) stay.emplace_back(head.scores.size(), false);
  for (std::size_t pool = 0; pool < keep.size(); ++pool) {
    std::vector<Row> rows;
    for (std::size_t i = 0; i < heads.size(); ++i) {
      if (heads[i].pool != static_cast<std::int64_t>(pool)) continue;
      for (std::size_t k = 0; k < heads[i].scores.size(); ++k) {
        const float score = heads[i].scores[k];
        rows.push_back({std::isfinite(score), score, heads[i].order, k, i});
      }
    }
    std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) {
      if (a.is_finite != b.is_finite) return b.is_finite;
      if (a.is_finite && a.score != b.score) return a.score > b.score;
      return a.order != b.order ? a.order < b.order : a.position < b.position;
    });
    for (std::size_t k = 0; k < rows.size(); ++k) {
      stay[rows[k].head][rows[k].position] =
          !rows[k].is_finite || static_cast<std::int64_t>(k) < keep[pool];
    }
  }
  return stay;
}

}  // namespace kvzap::test
