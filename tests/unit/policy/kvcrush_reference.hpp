// KVCrush by plain loops.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace kvzap::test {

/// What a scalar run of KVCrush needs of a layer.
struct KvCrushCase {
  std::vector<std::vector<std::int64_t>> positions;  // (head)(row)
  std::vector<std::vector<float>> scores;            // (head)(row)
  std::vector<bool> anchor;                          // (head)
  std::int64_t keep = 0;
  double share = 0.25;
};

/// Returns the best rows of a head, in descending order; of equal ones the older first.
inline std::vector<std::size_t> by_score(const std::vector<float>& scores) {
  std::vector<std::size_t> rows(scores.size());
  std::iota(rows.begin(), rows.end(), std::size_t{0});
  std::stable_sort(rows.begin(), rows.end(),
                   [&](std::size_t a, std::size_t b) { return scores[a] > scores[b]; });
  return rows;
}

/// Returns (head)(row): whether the row stays.
inline std::vector<std::vector<bool>> kept_by_kvcrush(const KvCrushCase& of) {
  const std::size_t heads = of.scores.size();
  // The bit of each head for a token.
  const auto bit = [&](std::size_t h, std::int64_t position) {
    const std::vector<std::size_t> order = by_score(of.scores[h]);
    for (std::size_t i = 0; i < order.size() / 2; ++i) {
      if (of.positions[h][order[i]] == position) return true;
    }
    return false;
  };
  const auto distance = [&](std::int64_t position) {
    int sum = 0;
    for (std::size_t h = 0; h < heads; ++h) sum += bit(h, position) != of.anchor[h] ? 1 : 0;
    return sum;
  };
  const auto few = static_cast<std::int64_t>(static_cast<double>(of.keep) * of.share);
  std::vector<std::vector<bool>> kept;
  for (std::size_t h = 0; h < heads; ++h) {
    const auto rows = static_cast<std::int64_t>(of.scores[h].size());
    kept.emplace_back(static_cast<std::size_t>(rows), rows <= of.keep);
    if (rows <= of.keep) continue;
    const std::vector<std::size_t> order = by_score(of.scores[h]);
    for (std::int64_t i = 0; i < of.keep - few; ++i) {
      kept[h][order[static_cast<std::size_t>(i)]] = true;
    }
    std::vector<std::pair<int, std::size_t>> others;
    for (std::size_t r = 0; r < order.size(); ++r) {
      if (!kept[h][r]) others.emplace_back(distance(of.positions[h][r]), r);
    }
    std::sort(others.begin(), others.end());
    // A row is the first of its group if the group before it ends here.
    for (std::int64_t group = 0; group < few; ++group) {
      const auto size = static_cast<std::int64_t>(others.size());
      kept[h][others[static_cast<std::size_t>(group * size / few)].second] = true;
    }
  }
  return kept;
}

}  // namespace kvzap::test
