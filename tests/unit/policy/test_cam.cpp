// Modifier cam: new values of kept rows, against sums row by row.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/machine.hpp"
#include "cam_reference.hpp"
#include "policy/registry.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap {
namespace {

using test::CamRows;
using test::CamRule;

/// Both forms of the kernels.
class Cam : public ::testing::TestWithParam<bool> {
 protected:
  Cam() : m_device(base::machine().on_device()) { base::machine().set_device(GetParam()); }
  ~Cam() override { base::machine().set_device(m_device); }

  static PolicyChoice choose(const CamRule& rule, ModelConfig config = {}) {
    PolicyChoice choice;
    choice.budget.amount = Budget::Amount::evict_ratio;
    const HeadPartition partition = HeadPartition::even(1, 1, 1);
    policy::cam().apply(choice,
                        PolicyArguments({{"window", std::to_string(rule.window)},
                                         {"seed", std::to_string(rule.seed)}}),
                        {config, partition, DType::f32, {}, Communicator::self()});
    return choice;
  }

  /// Returns the new values by row.
  static std::map<std::int64_t, std::vector<float>> run(ValueMerger& merger, const CamRows& head) {
    const auto rows = static_cast<std::int64_t>(head.keep.size());
    const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> values("rows", rows, head.dim);
    const auto from = Kokkos::create_mirror_view(values);
    std::copy(head.values.begin(), head.values.end(), from.data());
    Kokkos::deep_copy(values, from);
    const std::vector<std::uint8_t> keep(head.keep.begin(), head.keep.end());
    const std::vector<float> attention(head.attention.begin(), head.attention.end());
    const ExecutionSpace exec;
    CutHead shown = {exec, head.layer, head.head, values, values, keep.data()};
    shown.positions = head.positions.data();
    shown.scores = head.scores.data();
    shown.attention = attention.data();
    shown.steps = head.steps;
    const MergedValues& merged = merger.merge(shown);
    exec.fence();
    std::map<std::int64_t, std::vector<float>> result;
    if (merged.rows.empty()) return result;
    const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), merged.values);
    for (std::size_t i = 0; i < merged.rows.size(); ++i) {
      if (i > 0) {
        EXPECT_LT(merged.rows[i - 1], merged.rows[i]);
      }
      result[merged.rows[i]].assign(&host(i, 0), &host(i, 0) + head.dim);
    }
    return result;
  }

 private:
  bool m_device;
};

INSTANTIATE_TEST_SUITE_P(Kernels, Cam, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Device" : "Host"; });

CamRows random_head(unsigned seed, int dim, std::size_t rows, double kept) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  CamRows head;
  head.layer = static_cast<int>(random() % 5);
  head.head = static_cast<int>(random() % 9);
  head.dim = dim;
  for (std::size_t i = 0; i < rows * dim; ++i) head.values.push_back(normal(random));
  std::int64_t position = 0;
  for (std::size_t row = 0; row < rows; ++row) {
    head.positions.push_back(position += 1 + static_cast<std::int64_t>(random() % 7));
    head.scores.push_back(static_cast<float>(random() % 40));  // many are equal
    head.attention.push_back(static_cast<float>(std::exp(normal(random))));
    head.keep.push_back(static_cast<double>(random() % 1000) < 1000 * kept);
  }
  head.keep[0] = false;
  head.keep[rows - 1] = true;
  return head;
}

TEST_P(Cam, TakesUpSharesByAttention) {
  struct Case {
    int dim;
    std::size_t rows;
    double kept;
  };
  const Case cases[] = {{16, 60, 0.5}, {64, 333, 0.25}, {80, 401, 0.75}, {128, 1300, 0.5},
                        {6, 97, 0.9},  {7, 2, 0.5},     {5, 30, 0.1},    {12, 40, 0}};
  const CamRule rules[] = {{32, 0}, {1, 0}, {4, 7}, {1000, 4294967295U}};
  int drawn = 0, refused = 0, uncertain = 0;
  for (const CamRule& rule : rules) {
    const auto merger = choose(rule).merger();  // its memory serves heads of any size
    unsigned seed = 0;
    for (const Case& c : cases) {
      CamRows head = random_head(++seed, c.dim, c.rows, c.kept);
      for (const std::int64_t steps : {1, 5, 128, 5000}) {
        SCOPED_TRACE(std::to_string(c.rows) + " rows, " + std::to_string(steps) +
                     " steps, window " + std::to_string(rule.window));
        head.steps = steps;
        const test::CamResult expected = test::cam_rows(head, rule);
        drawn += expected.drawn, refused += expected.refused;
        uncertain += expected.is_uncertain ? 1 : 0;
        if (expected.is_uncertain) continue;
        const auto found = run(*merger, head);
        for (std::size_t row = 0; row < c.rows; ++row) {
          const auto at = found.find(static_cast<std::int64_t>(row));
          ASSERT_EQ(at != found.end(), expected.is_changed[row]) << row;
          if (at == found.end()) continue;
          for (int d = 0; d < head.dim; ++d) {
            const double value = expected.values[row * head.dim + d];
            EXPECT_NEAR(at->second[d], value, 1e-5 * std::max(1.0, std::abs(value))) << row;
          }
        }
      }
    }
  }
  EXPECT_GT(drawn, 3000);
  EXPECT_GT(refused, 1000);
  EXPECT_LT(uncertain, 30);
}

// Two evicted rows and the two that follow.
CamRows few_rows() {
  CamRows head;
  head.values = {1, 2, 30, 40};
  head.positions = {0, 1, 2, 3};
  head.scores = {1, 1, 5, 5};
  head.attention = {100, 100, 1, 1};
  head.keep = {false, false, true, true};
  return head;
}

TEST_P(Cam, TakesTheNewestOfEqualScores) {
  CamRows head = few_rows();
  const auto merger = choose({}).merger();
  EXPECT_EQ(run(*merger, head), (std::map<std::int64_t, std::vector<float>>{{2, {31}}, {3, {41}}}));
  head.steps = 2;
  EXPECT_EQ(run(*merger, head),
            (std::map<std::int64_t, std::vector<float>>{{2, {31.5}}, {3, {41.5}}}));
  head.scores[0] = 2;
  head.steps = 1;
  EXPECT_EQ(run(*merger, head),
            (std::map<std::int64_t, std::vector<float>>{{2, {30.5}}, {3, {40.5}}}));
  head.steps = 0;
  EXPECT_TRUE(run(*merger, head).empty());
}

TEST_P(Cam, DrawsNothingWithoutAttention) {
  CamRows head = few_rows();
  head.steps = 2;
  const auto merger = choose({}).merger();
  head.attention = {0, 0, 1, 1};
  EXPECT_TRUE(run(*merger, head).empty());
  // 0 of 0 is none; anything of 0 is all.
  head.attention = {0, 1e-30, 0, 0};
  EXPECT_EQ(run(*merger, head), (std::map<std::int64_t, std::vector<float>>{{2, {31}}, {3, {41}}}));
  head.attention = {std::nan(""), 100, 1, 1};
  EXPECT_EQ(run(*merger, head), (std::map<std::int64_t, std::vector<float>>{{2, {31}}, {3, {41}}}));
  // No row follows.
  head.attention = {100, 100, 1, 1};
  head.keep = {true, true, false, false};
  EXPECT_TRUE(run(*merger, head).empty());
}

TEST_P(Cam, DrawsByPlaceAndSeed) {
  // As many are drawn as the probability says, whatever the seed, layer or head.
  for (const double probability : {0.25, 0.75}) {
    CamRows head;
    head.steps = 4000;
    for (int row = 0; row < 8000; ++row) {
      const bool stays = row % 2 == 1;
      head.keep.push_back(stays);
      head.positions.push_back(row);
      head.values.push_back(stays ? 0.0f : 1.0f);
      head.scores.push_back(0);
      head.attention.push_back(stays ? 1 : probability);
    }
    std::vector<std::map<std::int64_t, std::vector<float>>> results;
    for (const std::uint64_t seed : {0, 1}) {
      const auto merger = choose({1, seed}).merger();
      for (const int place : {0, 1, 2}) {
        head.layer = place % 2;
        head.head = place / 2;
        results.push_back(run(*merger, head));
        EXPECT_NEAR(static_cast<double>(results.back().size()), 4000 * probability, 120);
      }
    }
    for (std::size_t a = 0; a < results.size(); ++a) {
      for (std::size_t b = 0; b < a; ++b) EXPECT_NE(results[a], results[b]);
    }
  }
}

TEST_P(Cam, HasNoMeaningWithoutValues) {
  EXPECT_TRUE(choose({}).sums_attention);
  ModelConfig config;
  config.latent = LatentConfig();
  test::expect_error([&] { choose({}, config); }, {"cam has no meaning here", "latent attention"});
}

}  // namespace
}  // namespace kvzap
