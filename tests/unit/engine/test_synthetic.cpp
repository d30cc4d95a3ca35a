#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <kvzap/engine/synthetic.hpp>
#include <map>
#include <numeric>
#include <set>
#include <vector>

#include "unit/temporary_folder.hpp"

namespace {

using kvzap::bfloat16;
using kvzap::CacheShape;
using kvzap::DTypeOf;
using kvzap::EvictionRule;
using kvzap::ExecutionSpace;
using kvzap::fill_random;
using kvzap::half;
using kvzap::head_keep_ratios;
using kvzap::HeadPartition;
using kvzap::KVCache;
using kvzap::MemorySpace;
using kvzap::RandomScorer;
using kvzap::Scorer;
using kvzap::SequenceId;
using kvzap::test::expect_error;

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / values.size();
}

TEST(HeadKeepRatios, AverageToTheKeepRatioAndAreGeometric) {
  for (int heads : {1, 2, 5, 8}) {
    for (double evict : {0.5, 0.75, 0.9, 1.0}) {
      for (double skew : {1.0, 2.0, 2.7}) {
        const auto ratios = head_keep_ratios(heads, evict, skew);
        ASSERT_EQ(ratios.size(), static_cast<std::size_t>(heads));
        EXPECT_NEAR(mean(ratios), 1 - evict, 1e-12);
        if (evict == 1.0) continue;
        EXPECT_NEAR(ratios.back() / ratios.front(), heads > 1 ? skew : 1.0, 1e-9);
        for (int h = 2; h < heads; ++h) {
          EXPECT_NEAR(ratios[h] / ratios[h - 1], ratios[1] / ratios[0], 1e-9);
        }
      }
    }
  }
}

TEST(HeadKeepRatios, NoHeadKeepsMoreThanEverything) {
  EXPECT_EQ(head_keep_ratios(4, 0.0, 7.0), std::vector<double>(4, 1.0));
  const auto ratios = head_keep_ratios(8, 0.3, 10.0);
  EXPECT_NEAR(mean(ratios), 0.7, 1e-12);
  EXPECT_EQ(ratios.back(), 1.0);
  EXPECT_EQ(ratios[6], 1.0);
  EXPECT_LT(ratios.front(), 0.7);
  EXPECT_GT(ratios.front(), 0.0);
  EXPECT_TRUE(std::is_sorted(ratios.begin(), ratios.end()));
  EXPECT_EQ(head_keep_ratios(3, 1.0, 4.0), std::vector<double>(3, 0.0));
}

TEST(HeadKeepRatios, ErrorsNameExpectedAndFound) {
  expect_error([] { head_keep_ratios(0, 0.5, 1); }, {"0 heads", "at least 1 head"});
  expect_error([] { head_keep_ratios(2, -0.1, 1); }, {"evict ratio -0.1", "from 0 to 1"});
  expect_error([] { head_keep_ratios(2, 1.1, 1); }, {"1.1"});
  expect_error([] { head_keep_ratios(2, NAN, 1); }, {"nan"});
  expect_error([] { head_keep_ratios(2, 0.5, 0.9); }, {"skew 0.9", "at least 1"});
  expect_error([] { head_keep_ratios(2, 0.5, INFINITY); }, {"skew inf"});
}

/// Scores (head, token) of positions first .. first + count - 1.
std::vector<std::vector<float>> scores_of(Scorer& scorer, int layer, std::int64_t first,
                                          std::int64_t count, std::int64_t heads) {
  const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> hidden("hidden", count, 3);
  const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> scores("scores", heads, count);
  const Kokkos::View<std::int64_t*, MemorySpace> positions("positions", count);
  const auto host_positions = Kokkos::create_mirror_view(positions);
  std::iota(host_positions.data(), host_positions.data() + count, first);
  Kokkos::deep_copy(positions, host_positions);
  const ExecutionSpace exec;
  scorer.score(exec, layer, positions, hidden, scores);
  exec.fence();
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, scores);
  std::vector<std::vector<float>> result(heads, std::vector<float>(count));
  for (std::int64_t h = 0; h < heads; ++h) {
    for (std::int64_t t = 0; t < count; ++t) result[h][t] = host(h, t);
  }
  return result;
}

TEST(RandomScorer, EvictsTheShareOfEachHead) {
  constexpr int heads = 8, count = 40000;
  RandomScorer scorer(HeadPartition::even(2, heads, 1), 0, 0.75, 4.0, 5);
  EXPECT_EQ(scorer.kind(), "random");
  std::set<std::vector<double>> orders;
  for (int layer : {0, 1}) {
    const auto scores = scores_of(scorer, layer, 0, count, heads);
    std::vector<double> ratios;
    for (int h = 0; h < heads; ++h) {
      const double kept =
          std::count_if(scores[h].begin(), scores[h].end(), [](float s) { return s >= 0; }) /
          double(count);
      ratios.push_back(scorer.keep_ratio(layer, h));
      // Five standard deviations of a binomial share.
      EXPECT_NEAR(kept, ratios.back(), 5 * std::sqrt(0.25 / count));
    }
    orders.insert(ratios);
    std::sort(ratios.begin(), ratios.end());
    EXPECT_EQ(ratios, head_keep_ratios(heads, 0.75, 4.0));
  }
  EXPECT_EQ(orders.size(), 2u) << "both layers deal their shares to heads in the same order";
}

TEST(RandomScorer, ScoresDependOnPositionAndHeadNotOnBlocksOrRanks) {
  constexpr int heads = 5, layers = 2, count = 100;
  const auto whole = HeadPartition::even(layers, heads, 1);
  RandomScorer scorer(whole, 0, 0.4, 3.0, 77);
  for (int layer = 0; layer < layers; ++layer) {
    const auto all = scores_of(scorer, layer, 0, count, heads);
    for (int ranks : {2, 3}) {
      const auto partition = HeadPartition::even(layers, heads, ranks);
      for (int rank = 0; rank < ranks; ++rank) {
        RandomScorer part(partition, rank, 0.4, 3.0, 77);
        const auto& mine = partition.heads(layer, rank);
        for (std::int64_t first : {0, 33}) {
          const auto found = scores_of(part, layer, first, 20, mine.size());
          for (std::size_t h = 0; h < mine.size(); ++h) {
            EXPECT_EQ(part.keep_ratio(layer, mine[h]), scorer.keep_ratio(layer, mine[h]));
            for (int t = 0; t < 20; ++t) EXPECT_EQ(found[h][t], all[mine[h]][first + t]);
          }
        }
      }
    }
  }
  // Another seed, layer or head gives other scores.
  RandomScorer other(whole, 0, 0.4, 3.0, 78);
  const auto a = scores_of(scorer, 0, 0, count, heads);
  EXPECT_NE(a, scores_of(other, 0, 0, count, heads));
  EXPECT_NE(a, scores_of(scorer, 1, 0, count, heads));
  EXPECT_NE(a[0], a[1]);
}

TEST(RandomScorer, KeepsAllOrNothingAtTheEnds) {
  const auto partition = HeadPartition::even(1, 2, 1);
  RandomScorer all(partition, 0, 0.0, 1.0, 1);
  RandomScorer none(partition, 0, 1.0, 1.0, 1);
  for (const auto& head : scores_of(all, 0, 0, 5000, 2)) {
    EXPECT_GE(*std::min_element(head.begin(), head.end()), 0.0f);
  }
  for (const auto& head : scores_of(none, 0, 0, 5000, 2)) {
    EXPECT_LT(*std::max_element(head.begin(), head.end()), 0.0f);
  }
}

TEST(RandomScorer, ErrorsNameExpectedAndFound) {
  const auto partition = HeadPartition::even(2, 3, 1);
  expect_error([&] { RandomScorer(partition, 1, 0.5, 1, 0); }, {"rank 1", "of 1"});
  expect_error([&] { RandomScorer(partition, 0, 2, 1, 0); }, {"evict ratio 2"});
  RandomScorer scorer(partition, 0, 0.5, 1, 0);
  expect_error([&] { scores_of(scorer, 2, 0, 4, 3); }, {"no layer 2", "2"});
  expect_error([&] { scores_of(scorer, 0, 0, 4, 2); }, {"(2, 4)", "(3, 4)"});
  expect_error([&] { scorer.keep_ratio(0, 3); }, {"KV head 3", "3 heads"});
  expect_error([&] { scorer.keep_ratio(-1, 0); }, {"layer -1"});
}

template <class Parameter>
class FillRandom : public ::testing::Test {};
using Values = ::testing::Types<float, half, bfloat16>;
TYPED_TEST_SUITE(FillRandom, Values);

TYPED_TEST(FillRandom, LeavesWhatThePrefillOfAsManyTokensWould) {
  using Value = TypeParam;
  constexpr int window = 100, heads = 2, layers = 2, dim = 16;
  constexpr std::int64_t tokens = 2600;
  KVCache cache(DTypeOf<Value>::value, CacheShape{{heads, heads}, dim, window, 16});
  const SequenceId id = cache.add_sequence();
  RandomScorer scorer(HeadPartition::even(layers, heads, 1), 0, 0.6, 2.0, 3);
  // In two calls: the second goes on where the first ended.
  fill_random(cache, id, 2300, &scorer, 7, EvictionRule{0.0f, 4, true}, 9);
  fill_random(cache, id, tokens - 2300, &scorer, 7, EvictionRule{0.0f, 4, true}, 9);
  double sum = 0, squares = 0;
  std::int64_t values = 0;
  for (int layer = 0; layer < layers; ++layer) {
    EXPECT_EQ(cache.tokens(id, layer), tokens);
    const auto scores = scores_of(scorer, layer, 0, tokens, heads);
    for (int head = 0; head < heads; ++head) {
      const auto rows = cache.host_rows(id, layer, head);
      std::vector<std::int64_t> expected;
      for (std::int64_t p = 0; p < tokens; ++p) {
        if (p < 4 || p >= tokens - window || scores[head][p] >= 0) expected.push_back(p);
      }
      EXPECT_EQ(rows.positions, expected);
      for (const auto* list : {&rows.keys, &rows.values}) {
        for (const double x : *list) {
          sum += x;
          squares += x * x;
        }
        values += list->size();
      }
      // Rows of one chunk differ from one another, and keys from values.
      std::map<std::vector<float>, int> distinct;
      const std::size_t last = rows.positions.size();
      for (std::size_t r = last - window; r < last; ++r) {
        for (const auto* list : {&rows.keys, &rows.values}) {
          ++distinct[std::vector<float>(list->begin() + r * dim, list->begin() + (r + 1) * dim)];
        }
      }
      EXPECT_EQ(distinct.size(), 2u * window);
    }
  }
  EXPECT_NEAR(sum / values, 0, 0.05);
  EXPECT_NEAR(squares / values, 1, 0.05);
}

TYPED_TEST(FillRandom, WithoutAScorerEverythingStays) {
  using Value = TypeParam;
  KVCache cache(DTypeOf<Value>::value, CacheShape{{3, 0, 1}, 8, 4, 7});
  const SequenceId id = cache.add_sequence();
  fill_random(cache, id, 0, nullptr, 0, EvictionRule::keep_all(), 1);
  EXPECT_EQ(cache.tokens(id, 0), 0);
  fill_random(cache, id, 50, nullptr, 0, EvictionRule::keep_all(), 1);
  EXPECT_EQ(cache.rows(id, 0, 2), 50);
  EXPECT_EQ(cache.rows(id, 2, 0), 50);
  EXPECT_EQ(cache.tokens(id, 1), 50);
  expect_error([&] { fill_random(cache, id, -1, nullptr, 0, EvictionRule::keep_all(), 1); },
               {"-1 tokens"});
  expect_error([&] { fill_random(cache, id, 1, nullptr, -2, EvictionRule::keep_all(), 1); },
               {"hidden size -2"});
}

}  // namespace
