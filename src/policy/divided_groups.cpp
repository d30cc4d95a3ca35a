#include "policy/divided_groups.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvzap::policy {
namespace {

using RowList = std::vector<std::int64_t>;

constexpr double tiny = 1e-8;  // kvpress' EPSILON

struct Group {
  std::int64_t begin, count;
  double mean, entropy;
};

/// The entropy of scores as shares of their sum, over its largest possible value.
double entropy_of(const double* scores, std::int64_t count) {
  if (count == 1) return 0;
  const double base = std::min(0.0, *std::min_element(scores, scores + count));
  double sum = tiny;
  for (std::int64_t i = 0; i < count; ++i) sum += scores[i] - base;
  double entropy = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const double share = (scores[i] - base) / sum;
    entropy -= share * std::log(share + tiny);
  }
  return std::clamp(entropy / std::log(static_cast<double>(count)), 0.0, 1.0);
}

/// The lower one of the two middle values of an even number, as torch.median.
template <class Value>
double median_of(const std::vector<Group>& groups, const Value& value) {
  std::vector<double> values;
  for (const Group& group : groups) values.push_back(value(group));
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Keeps the `count` of the rows that have the largest scores.
void keep_largest(const std::vector<double>& scores, RowList rows, std::int64_t count,
                  std::vector<std::uint8_t>& stays) {
  std::stable_sort(rows.begin(), rows.end(), [&](std::int64_t a, std::int64_t b) {
    return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
  });
  for (std::int64_t i = 0; i < count; ++i) stays[static_cast<std::size_t>(rows[i])] = 1;
}

}  // namespace

std::vector<std::uint8_t> divided_groups(const std::vector<double>& given, const GroupSizes& sizes,
                                         std::int64_t keep) {
  std::vector<double> scores = given;
  for (double& score : scores) score = std::isfinite(score) ? score : 0;
  const auto count = static_cast<std::int64_t>(scores.size());
  std::vector<Group> groups;
  for (std::int64_t begin = 0; begin < count; begin += sizes.length) {
    Group group = {begin, std::min(sizes.length, count - begin), 0, 0};
    const double* const first = scores.data() + begin;
    group.mean =
        std::accumulate(first, first + group.count, 0.0) / static_cast<double>(group.count);
    group.entropy = entropy_of(first, group.count);
    groups.push_back(group);
  }
  const double large = median_of(groups, [](const Group& group) { return group.mean; });
  const double even = median_of(groups, [](const Group& group) { return group.entropy; });
  std::stable_sort(groups.begin(), groups.end(),
                   [](const Group& a, const Group& b) { return a.mean > b.mean; });

  std::vector<std::uint8_t> stays(scores.size(), 0);
  std::int64_t left = std::min(keep, count);
  for (const Group& group : groups) {
    std::int64_t kept = std::min(group.count, left);
    if (group.mean >= large && group.entropy < even) kept = std::min(kept, sizes.spiky);
    RowList rows(static_cast<std::size_t>(group.count));
    std::iota(rows.begin(), rows.end(), group.begin);
    keep_largest(scores, std::move(rows), kept, stays);
    left -= kept;
  }
  RowList others;
  for (std::int64_t row = 0; row < count; ++row) {
    if (stays[static_cast<std::size_t>(row)] == 0) others.push_back(row);
  }
  keep_largest(scores, std::move(others), left, stays);
  for (std::size_t row = 0; row < given.size(); ++row) {
    if (!std::isfinite(given[row])) stays[row] = 1;
  }
  return stays;
}

}  // namespace kvzap::policy
