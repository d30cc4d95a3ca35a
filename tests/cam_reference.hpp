// What `+cam` leaves of a head's kept values, row by row in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

namespace kvzap::test {

struct CamRule {
  std::int64_t window = 32;
  std::uint64_t seed = 0;
};

/// The rows of one head at a cut.
struct CamRows {
  int layer = 0, head = 0, dim = 1;
  std::int64_t steps = 1;
  std::vector<float> values;  // (row, dim)
  // (row)
  std::vector<std::int64_t> positions;
  std::vector<float> scores;
  std::vector<double> attention;
  std::vector<bool> keep;
};

struct CamResult {
  std::vector<double> values;    // (row, dim); those of rows that go are of no meaning
  std::vector<bool> is_changed;  // (row)
  int drawn = 0, refused = 0;    // candidates
  bool is_uncertain = false;     // rounding may decide a draw
};

/// SplitMix64's finalizer, written down once more.
inline double cam_draw(std::uint64_t seed, int layer, int head, std::int64_t position) {
  const auto next = [](std::uint64_t x) {
    x += 0x9e3779b97f4a7c15U;
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9U;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebU;
    return x ^ (x >> 31);
  };
  std::uint64_t x = next(next(seed) + 1);
  for (const std::int64_t part : {std::int64_t{layer}, std::int64_t{head}, position}) {
    x = next(x ^ static_cast<std::uint64_t>(part));
  }
  return static_cast<double>(x >> 40) / (1 << 24);
}

inline CamResult cam_rows(const CamRows& head, const CamRule& rule) {
  const std::size_t rows = head.keep.size();
  CamResult result;
  result.values.assign(head.values.begin(), head.values.end());
  result.is_changed.assign(rows, false);
  std::vector<std::size_t> evicted;
  for (std::size_t row = rows; row-- > 0;) {
    if (!head.keep[row]) evicted.push_back(row);
  }
  std::stable_sort(evicted.begin(), evicted.end(),
                   [&](std::size_t a, std::size_t b) { return head.scores[a] > head.scores[b]; });
  evicted.resize(std::min(evicted.size(), static_cast<std::size_t>(head.steps)));
  for (const std::size_t e : evicted) {
    std::vector<std::size_t> window;
    double sum = 0;
    for (std::size_t row = e + 1; row < rows; ++row) {
      if (!head.keep[row] || static_cast<std::int64_t>(window.size()) == rule.window) continue;
      window.push_back(row);
      sum += head.attention[row];
    }
    if (window.empty()) continue;
    const double probability = head.attention[e] / (sum / static_cast<double>(window.size()));
    const double drawn = cam_draw(rule.seed, head.layer, head.head, head.positions[e]);
    if (std::abs(drawn - probability) < 1e-4) result.is_uncertain = true;
    if (!(drawn < probability)) {
      ++result.refused;
      continue;
    }
    ++result.drawn;
    for (const std::size_t row : window) {
      result.is_changed[row] = true;
      for (int d = 0; d < head.dim; ++d) {
        result.values[row * head.dim + d] +=
            static_cast<double>(head.values[e * head.dim + d]) / static_cast<double>(window.size());
      }
    }
  }
  return result;
}

}  // namespace kvzap::test
