#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <kvzap/core/selection.hpp>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/machine.hpp"
#include "selection_reference.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap {
namespace {

using test::Head;

constexpr float infinity = std::numeric_limits<float>::infinity();
const float nan = std::nanf("");

/// Both forms of the kernels.
class Selection : public ::testing::TestWithParam<bool> {
 protected:
  Selection() : m_device(base::machine().on_device()) { base::machine().set_device(GetParam()); }
  ~Selection() override { base::machine().set_device(m_device); }

  std::vector<Cutoff> select(const std::vector<Head>& heads,
                             const std::vector<std::int64_t>& keep) const {
    std::vector<ScoreSegment> segments;
    for (const Head& head : heads) segments.push_back(test::segment_of(head));
    return select_top(ExecutionSpace(), Communicator::self(), segments, keep);
  }

  /// Selects, and expects the rows that sorting says.
  void check(const std::vector<Head>& heads, const std::vector<std::int64_t>& keep) const {
    const std::vector<Cutoff> cutoffs = select(heads, keep);
    ASSERT_EQ(cutoffs.size(), heads.size());
    const auto expected = test::stay_by_sorting(heads, keep);
    for (std::size_t i = 0; i < heads.size(); ++i) {
      EXPECT_EQ(test::stay_by_cutoff(heads[i], cutoffs[i]), expected[i]) << "segment " << i;
    }
  }

 private:
  bool m_device;
};

INSTANTIATE_TEST_SUITE_P(Kernels, Selection, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Device" : "Host"; });

TEST_P(Selection, NothingToSelect) {
  EXPECT_TRUE(select({}, {}).empty());
  EXPECT_TRUE(select({}, {0, 0}).empty());
  const std::vector<Cutoff> cutoffs = select({{{}, 0, 0}, {{}, 0, 1}}, {0});
  ASSERT_EQ(cutoffs.size(), 2u);
  for (const Cutoff& cutoff : cutoffs) {
    EXPECT_EQ(cutoff.score, infinity);
    EXPECT_EQ(cutoff.ties, 0);
  }
}

TEST_P(Selection, AnyNumberOfRows) {
  const std::vector<Head> heads = {{{3, 1, 2, 2}, 0, 7}, {{}, 0, 8}, {{2, 5}, 0, 3}};
  for (std::int64_t keep = 0; keep <= 6; ++keep) check(heads, {keep});
  // 5, 3, then two of the three 2s: order 3 comes before order 7.
  const std::vector<Cutoff> cutoffs = select(heads, {4});
  EXPECT_EQ(cutoffs[0].score, 2.0f);
  EXPECT_EQ(cutoffs[0].ties, 1);
  EXPECT_EQ(cutoffs[1].ties, 0);
  EXPECT_EQ(cutoffs[2].ties, 1);
}

TEST_P(Selection, AllEqual) {
  const std::vector<Head> heads = {{std::vector<float>(100, -2.5f), 0, 1},
                                   {std::vector<float>(7, -2.5f), 0, 0}};
  for (std::int64_t keep : {0, 1, 6, 7, 8, 106, 107}) check(heads, {keep});
}

TEST_P(Selection, ZeroIsNegativeZero) {
  const std::vector<Head> heads = {{{0.0f, -0.0f, 0.0f, -1.0f}, 0, 1},
                                   {{-0.0f, 0.0f, 1e-45f, -1e-45f}, 0, 0}};
  for (std::int64_t keep = 0; keep <= 8; ++keep) check(heads, {keep});
}

TEST_P(Selection, SubnormalAndHugeNumbers) {
  const float largest = std::numeric_limits<float>::max();
  const float smallest = std::numeric_limits<float>::min();
  const std::vector<Head> heads = {
      {{largest, -largest, smallest, -smallest, 1e-45f, -1e-45f, 2e-45f, 0, 1e-40f, -1e-40f}, 0, 0},
      {{std::nextafter(1.0f, 2.0f), 1.0f, std::nextafter(1.0f, 0.0f), -largest, largest}, 0, 1}};
  for (std::int64_t keep = 0; keep <= 15; ++keep) check(heads, {keep});
}

// As EvictionRule has it: what is no number stays, whatever its sign.
TEST_P(Selection, NaNAndInfinityStay) {
  const std::vector<Head> heads = {{{1, nan, -infinity, 2}, 0, 0}, {{infinity, 3, -nan, 0}, 0, 1}};
  for (std::int64_t keep = 0; keep <= 8; ++keep) check(heads, {keep});
  for (std::int64_t keep : {0, 1, 4}) {
    for (const Cutoff& cutoff : select(heads, {keep})) {
      EXPECT_EQ(cutoff.score, infinity) << keep;
      EXPECT_EQ(cutoff.ties, 0) << keep;
    }
  }
}

std::vector<Head> random_heads(std::uint32_t seed, int n_pools, int n_heads, std::int64_t most_rows,
                               bool with_ties) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(-6, 2);
  std::vector<Head> heads(static_cast<std::size_t>(n_heads));
  for (std::size_t i = 0; i < heads.size(); ++i) {
    heads[i].pool = static_cast<std::int64_t>(random() % static_cast<unsigned>(n_pools));
    heads[i].order = static_cast<std::int64_t>((i * 37) % heads.size());
    heads[i].scores.resize(random() % static_cast<std::uint64_t>(most_rows + 1));
    for (float& score : heads[i].scores) {
      score = normal(random);
      if (with_ties) score = std::round(score);
      if (random() % 500 == 0) score = random() % 2 == 0 ? nan : -infinity;
    }
  }
  return heads;
}

TEST_P(Selection, RandomScoresInManyPools) {
  for (const bool with_ties : {false, true}) {
    for (const int n_pools : {1, 3, 70, 150}) {  // more pools than are looked at together
      const auto heads = random_heads(5, n_pools, 73, 900, with_ties);
      for (const double share : {0.0, 0.001, 0.25, 0.9, 1.0}) {
        std::vector<std::int64_t> keep(static_cast<std::size_t>(n_pools), 0);
        for (const Head& head : heads) {
          keep[static_cast<std::size_t>(head.pool)] +=
              static_cast<std::int64_t>(head.scores.size());
        }
        for (std::int64_t& k : keep) {
          k = static_cast<std::int64_t>(std::llround(share * static_cast<double>(k)));
        }
        check(heads, keep);
      }
    }
  }
}

TEST_P(Selection, LongSegmentsInSeveralTiles) {
  std::vector<Head> heads = random_heads(6, 1, 2, 10, true);
  std::mt19937 random(7);
  for (Head& head : heads) {
    head.scores.resize(70000 + random() % 100000);
    for (float& score : head.scores) score = static_cast<float>(random() % 1000);
  }
  check(heads, {100000});
}

TEST_P(Selection, MoreRowsIncludeFewer) {
  const auto heads = random_heads(8, 1, 6, 300, true);
  std::int64_t rows = 0;
  for (const Head& head : heads) rows += static_cast<std::int64_t>(head.scores.size());
  std::vector<std::vector<bool>> fewer;
  for (std::int64_t keep = 0; keep <= rows; keep += 1 + rows / 50) {
    const std::vector<Cutoff> cutoffs = select(heads, {keep});
    for (std::size_t i = 0; i < heads.size(); ++i) {
      const std::vector<bool> stay = test::stay_by_cutoff(heads[i], cutoffs[i]);
      if (keep == 0) {
        fewer.push_back(stay);
        continue;
      }
      for (std::size_t row = 0; row < stay.size(); ++row) {
        EXPECT_TRUE(stay[row] || !fewer[i][row]) << keep << " " << i << " " << row;
      }
      fewer[i] = stay;
    }
  }
}

TEST_P(Selection, OrderOfSegmentsDoesNotMatter) {
  auto heads = random_heads(9, 2, 20, 200, true);
  const std::vector<Cutoff> cutoffs = select(heads, {300, 200});
  std::vector<Head> reversed(heads.rbegin(), heads.rend());
  const std::vector<Cutoff> others = select(reversed, {300, 200});
  for (std::size_t i = 0; i < heads.size(); ++i) {
    EXPECT_EQ(cutoffs[i].score, others[heads.size() - 1 - i].score);
    EXPECT_EQ(cutoffs[i].ties, others[heads.size() - 1 - i].ties);
  }
}

TEST_P(Selection, StridedScores) {
  const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> scores("scores", 50, 3);
  const auto host = Kokkos::create_mirror_view(scores);
  Head head{{}, 0, 0};
  for (int row = 0; row < 50; ++row) {
    for (int other = 0; other < 3; ++other) host(row, other) = 1000;
    host(row, 1) = static_cast<float>((row * 17) % 50);
    head.scores.push_back(host(row, 1));
  }
  Kokkos::deep_copy(scores, host);
  const ScoreSegment segment{Kokkos::subview(scores, Kokkos::ALL, 1), 0, 0};
  const auto cutoffs = select_top(ExecutionSpace(), Communicator::self(), {segment}, {20});
  EXPECT_EQ(test::stay_by_cutoff(head, cutoffs[0]), test::stay_by_sorting({head}, {20})[0]);
}

TEST_P(Selection, RefusesWhatDoesNotFit) {
  const std::vector<Head> heads = {{{1, 2, 3}, 0, 0}, {{4}, 1, 0}};
  const auto refuse = [&](const std::vector<Head>& given, const std::vector<std::int64_t>& keep,
                          std::initializer_list<std::string_view> parts) {
    test::expect_error([&] { select(given, keep); }, parts);
  };
  refuse(heads, {4, 0}, {"4 rows of pool 0", "has 3"});
  refuse(heads, {3, -1}, {"-1 rows of pool 1"});
  refuse(heads, {3}, {"pool 1", "one of 1"});
  refuse({{{1}, -1, 0}}, {1}, {"pool -1"});
  refuse({{{1}, 0, 5}, {{1}, 0, 5}}, {1}, {"pool 0", "order 5"});
}

}  // namespace
}  // namespace kvzap
