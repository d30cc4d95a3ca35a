// Modifier merge: new values of kept rows, against sums row by row.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/machine.hpp"
#include "merge_reference.hpp"
#include "policy/registry.hpp"

namespace kvzap {
namespace {

using test::MergeRows;
using test::MergeRule;

/// Both forms of the kernels.
class Merge : public ::testing::TestWithParam<bool> {
 protected:
  Merge() : m_device(base::machine().on_device()) { base::machine().set_device(GetParam()); }
  ~Merge() override { base::machine().set_device(m_device); }

  static std::unique_ptr<ValueMerger> make(const MergeRule& rule = {}) {
    ModelConfig config{};
    PolicyChoice choice;
    choice.budget.amount = Budget::Amount::evict_ratio;
    const HeadPartition partition = HeadPartition::even(1, 1, 1);
    policy::merge().apply(choice,
                          PolicyArguments({{"similarity", std::to_string(rule.similarity)},
                                           {"fraction", std::to_string(rule.fraction)}}),
                          {config, partition, DType::f32, {}, Communicator::self()});
    return choice.merger();
  }

  /// Returns the new values by row.
  static std::map<std::int64_t, std::vector<float>> run(ValueMerger& merger,
                                                        const MergeRows& head) {
    const auto rows = static_cast<std::int64_t>(head.keep.size());
    const auto brought = [&](const std::vector<float>& from) {
      const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> to("rows", rows, head.dim);
      const auto host = Kokkos::create_mirror_view(to);
      std::copy(from.begin(), from.end(), host.data());
      Kokkos::deep_copy(to, host);
      return to;
    };
    const std::vector<std::uint8_t> keep(head.keep.begin(), head.keep.end());
    const ExecutionSpace exec;
    const MergedValues& merged =
        merger.merge({exec, 0, 0, brought(head.keys), brought(head.values), keep.data()});
    exec.fence();
    std::map<std::int64_t, std::vector<float>> result;
    if (merged.rows.empty()) return result;
    const auto values = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), merged.values);
    for (std::size_t i = 0; i < merged.rows.size(); ++i) {
      if (i > 0) {
        EXPECT_LT(merged.rows[i - 1], merged.rows[i]);
      }
      result[merged.rows[i]].assign(&values(i, 0), &values(i, 0) + head.dim);
    }
    return result;
  }

 private:
  bool m_device;
};

INSTANTIATE_TEST_SUITE_P(Kernels, Merge, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Device" : "Host"; });

MergeRows random_head(unsigned seed, int dim, std::size_t rows, double kept) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  MergeRows head;
  head.dim = dim;
  for (std::size_t i = 0; i < rows * dim; ++i) head.keys.push_back(normal(random));
  for (std::size_t i = 0; i < rows * dim; ++i) head.values.push_back(normal(random));
  for (std::size_t row = 0; row < rows; ++row) {
    head.keep.push_back(static_cast<double>(random() % 1000) < 1000 * kept);
  }
  head.keep[0] = true;
  head.keep[1] = false;
  return head;
}

void expect_merged(const std::map<std::int64_t, std::vector<float>>& found, const MergeRows& head,
                   const MergeRule& rule) {
  const test::MergedRows expected = test::merged_rows(head, rule);
  int uncertain = 0;
  for (std::size_t row = 0; row < head.keep.size(); ++row) {
    if (expected.is_uncertain[row]) {
      ++uncertain;
      continue;
    }
    const auto at = found.find(static_cast<std::int64_t>(row));
    ASSERT_EQ(at != found.end(), expected.is_merged[row]) << row;
    if (at == found.end()) continue;
    for (int d = 0; d < head.dim; ++d) {
      EXPECT_NEAR(at->second[d], expected.values[row * head.dim + d], 1e-5) << row << ", " << d;
    }
  }
  EXPECT_LE(uncertain, 2 + static_cast<int>(head.keep.size() / 50));
}

TEST_P(Merge, TakesUpValuesByTheNearestKey) {
  struct Case {
    int dim;
    std::size_t rows;
    double kept;
  };
  // More evicted and kept rows than a tile has; heads of few rows.
  const Case cases[] = {{16, 60, 0.5}, {64, 333, 0.25}, {80, 401, 0.75}, {32, 2300, 0.5},
                        {6, 97, 0.9},  {7, 2, 0.5},     {5, 3, 0.1},     {12, 40, 0}};
  const MergeRule rules[] = {{0, 1}, {0.3, 1}, {0, 0.5}, {0.25, 0.75}, {0, 0.01}, {1, 1}};
  for (const MergeRule& rule : rules) {
    const auto merger = make(rule);  // its memory serves heads of any size
    unsigned seed = 0;
    for (const Case& c : cases) {
      if (c.rows > 1000 && rule.fraction < 1) continue;  // the reference takes long
      SCOPED_TRACE(std::to_string(c.rows) + " rows, similarity " + std::to_string(rule.similarity) +
                   ", fraction " + std::to_string(rule.fraction));
      const MergeRows head = random_head(++seed, c.dim, c.rows, c.kept);
      expect_merged(run(*merger, head), head, rule);
    }
  }
}

TEST_P(Merge, TakesTheOldestOfEqualKeys) {
  // Rows 1, 3 and 1500 have the same key; row 2 goes.
  MergeRows head = random_head(3, 8, 1502, 1);
  for (const std::size_t row : {3U, 1500U}) {
    std::copy_n(head.key(1), 8, head.keys.begin() + static_cast<std::ptrdiff_t>(row * 8));
  }
  std::copy_n(head.key(1), 8, head.keys.begin() + 2 * 8);
  head.keep.assign(1502, true);
  head.keep[2] = false;
  auto found = run(*make(), head);
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found.begin()->first, 1);
  head.keep[1] = false;  // both go to row 3
  found = run(*make(), head);
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found.begin()->first, 3);
  // Opposite keys have no weight.
  for (int d = 0; d < 8; ++d) head.keys[2 * 8 + d] *= -1;
  MergeRows two = {1, {1, -1}, {3, 5}, {true, false}};
  EXPECT_TRUE(run(*make(), two).empty());
}

TEST_P(Merge, PassesOverWhatHasNoLength) {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  constexpr float inf = std::numeric_limits<float>::infinity();
  const auto expect_merging = [](const MergeRows& head, std::vector<std::int64_t> rows) {
    std::vector<std::int64_t> merged;
    for (const auto& [row, values] : run(*make(), head)) {
      merged.push_back(row);
      for (const float value : values) EXPECT_TRUE(std::isfinite(value)) << row;
    }
    EXPECT_EQ(merged, rows);
  };
  const MergeRows plain = {2, {1, 0, 0, 1, 1, 0.1f}, {1, 2, 3, 4, 5, 6}, {true, true, false}};
  expect_merging(plain, {0});
  for (const float bad : {nan, inf, -inf, 0.0f}) {
    SCOPED_TRACE(bad);
    MergeRows head = plain;  // an evicted key
    head.keys[4] = bad;
    head.keys[5] = bad == 0 ? 0 : 1;
    expect_merging(head, {});
    head = plain;  // the nearest kept key: the next one takes its place
    head.keys[0] = bad;
    expect_merging(head, {1});
    head = plain;  // the evicted value
    head.values[4] = bad;
    if (bad == 0) head.values[5] = 0;
    expect_merging(head, {});
    head = plain;  // the value of the nearest kept key
    head.values[0] = head.values[1] = bad;
    expect_merging(head, bad == 0 ? std::vector<std::int64_t>{0} : std::vector<std::int64_t>{});
  }
  // All keys alike, and no lengths at all.
  expect_merging({1, {0, 0, 0}, {0, 0, 0}, {true, true, false}}, {});
}

}  // namespace
}  // namespace kvzap
