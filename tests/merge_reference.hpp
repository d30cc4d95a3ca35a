// What `+merge` leaves of a head, row by row in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace kvzap::test {

struct MergeRule {
  double similarity = 0;
  double fraction = 1;
};

/// The rows of one head, (row, dim), and which of them stay.
struct MergeRows {
  int dim = 1;
  std::vector<float> keys, values;
  std::vector<bool> keep;

  const float* key(std::size_t row) const { return keys.data() + row * dim; }
  const float* value(std::size_t row) const { return values.data() + row * dim; }
};

struct MergedRows {
  std::vector<double> values;   // (row, dim); those of rows that go are of no meaning
  std::vector<bool> is_merged;  // (row): whether it has another value than before
  /// (row): whether a difference in rounding may change which rows it takes up.
  std::vector<bool> is_uncertain;
};

inline double length_of(const float* x, int dim) {
  double squares = 0;
  for (int d = 0; d < dim; ++d) squares += static_cast<double>(x[d]) * x[d];
  return std::sqrt(squares);
}

/// All keys and values must be finite.
inline MergedRows merged_rows(const MergeRows& head, const MergeRule& rule) {
  constexpr double rounding = 1e-5;
  struct Match {
    std::size_t row, kept, next;  // `next`: the second best, or the same
    double similarity, next_similarity;
  };
  const std::size_t rows = head.keep.size();
  const int dim = head.dim;
  std::vector<double> lengths;
  for (std::size_t row = 0; row < rows; ++row) {
    lengths.push_back(std::max(length_of(head.key(row), dim), 1e-6));
  }
  std::vector<Match> matches;
  for (std::size_t e = 0; e < rows; ++e) {
    if (head.keep[e]) continue;
    Match match = {e, rows, rows, -3, -3};
    for (std::size_t k = 0; k < rows; ++k) {
      if (!head.keep[k]) continue;
      double cosine = 0;
      for (int d = 0; d < dim; ++d) cosine += static_cast<double>(head.key(e)[d]) * head.key(k)[d];
      cosine /= lengths[e] * lengths[k];
      if (cosine > match.similarity) {
        match.next = match.kept, match.next_similarity = match.similarity;
        match.kept = k, match.similarity = cosine;
      } else if (cosine > match.next_similarity) {
        match.next = k, match.next_similarity = cosine;
      }
    }
    matches.push_back(match);
  }
  MergedRows result;
  result.values.assign(head.values.begin(), head.values.end());
  result.is_merged.assign(rows, false);
  result.is_uncertain.assign(rows, false);
  if (matches.empty() || matches[0].kept == rows) return result;
  double least = rule.similarity;
  if (rule.fraction < 1) {
    std::vector<double> sorted;
    for (const Match& match : matches) sorted.push_back(match.similarity);
    std::sort(sorted.begin(), sorted.end());
    const float rank =
        static_cast<float>(1 - rule.fraction) * static_cast<float>(sorted.size() - 1);
    least = std::max(least, sorted[static_cast<std::size_t>(std::ceil(rank))]);
  }
  std::vector<double> sums(head.values.size(), 0), weights(rows, 0);
  for (const Match& match : matches) {
    const bool is_near = match.similarity - match.next_similarity < rounding;
    const double above = std::abs(match.similarity - least);
    if (is_near || (above != 0 && above < rounding)) {
      result.is_uncertain[match.kept] = true;
      if (is_near && match.next < rows) result.is_uncertain[match.next] = true;
    }
    if (match.similarity < least) continue;
    const double own = length_of(head.value(match.row), dim);
    const double target = length_of(head.value(match.kept), dim);
    const double weight = std::max(0.0, match.similarity) * own / (own + target + 1e-6);
    if (!(weight > 0)) continue;
    result.is_merged[match.kept] = true;
    weights[match.kept] += weight;
    for (int d = 0; d < dim; ++d) sums[match.kept * dim + d] += weight * head.value(match.row)[d];
  }
  for (std::size_t k = 0; k < rows; ++k) {
    for (int d = 0; d < dim; ++d) {
      const std::size_t i = k * dim + d;
      result.values[i] = (result.values[i] + sums[i]) / (1 + weights[k]);
    }
  }
  return result;
}

}  // namespace kvzap::test
