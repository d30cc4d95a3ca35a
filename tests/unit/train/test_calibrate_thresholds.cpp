// Which threshold evicts which share of texts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <kvzap/lab/calibrate_thresholds.hpp>
#include <limits>
#include <random>
#include <vector>

#include "unit/temporary_folder.hpp"
#include "watched.hpp"

namespace kvzap {
namespace {

std::vector<float> normal_scores(std::int64_t count, unsigned seed, float mean = -4) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(mean, 1.5f);
  std::vector<float> scores(static_cast<std::size_t>(count));
  for (float& score : scores) score = normal(random);
  return scores;
}

double share_below(const std::vector<float>& scores, float threshold, std::int64_t pairs) {
  const auto below =
      std::count_if(scores.begin(), scores.end(), [&](float score) { return score < threshold; });
  return static_cast<double>(below) / static_cast<double>(pairs);
}

TEST(EvictRatioCurves, Exact) {
  // 2 pairs a token; of the second text half of the tokens are judged, of the third none.
  const std::vector<float> first = {-1, -2, -3, -4, -5, -6, -7, -8}, second = {-2, -2, -2, -9};
  EvictRatioCurves curves(2, Communicator::self());
  curves.add_text(4, {first});
  curves.add_text(4, {second});
  curves.add_text(5, {});
  EXPECT_EQ(curves.texts(), 3);
  EXPECT_EQ(curves.tokens(), 13);
  using Ratios = std::vector<double>;
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(curves.evict_ratios(-infinity), (Ratios{0, 0, 0}));
  EXPECT_EQ(curves.evict_ratios(-9), (Ratios{0, 0, 0}));  // below it, not at it
  EXPECT_EQ(curves.evict_ratios(-4), (Ratios{0.5, 0.125, 0}));
  EXPECT_EQ(curves.evict_ratios(-2), (Ratios{0.75, 0.125, 0}));
  EXPECT_EQ(curves.evict_ratios(-1.5f), (Ratios{0.875, 0.5, 0}));
  EXPECT_EQ(curves.evict_ratios(infinity), (Ratios{1, 0.5, 0}));
  EXPECT_EQ(curves.largest(), 0.5);
  EXPECT_DOUBLE_EQ(curves.mean(-4), 0.625 / 3);

  const ThresholdTable::Row row = curves.row(0.2);
  EXPECT_EQ(row.evict_ratio, 0.2);
  EXPECT_NEAR(row.threshold, -4.5, 1e-6);  // in the middle of -5 and -4
  EXPECT_DOUBLE_EQ(row.mean, 0.625 / 3);
  EXPECT_EQ(row.least, 0);
  EXPECT_EQ(row.most, 0.5);
  const double mean = 0.625 / 3;
  EXPECT_NEAR(row.deviation,
              std::sqrt((std::pow(0.5 - mean, 2) + std::pow(0.125 - mean, 2) + mean * mean) / 2),
              1e-12);
  // Between -2 and -1 four scores go at once: the nearer side.
  EXPECT_NEAR(curves.row(0.30).threshold, -2.5, 1e-6);
  EXPECT_NEAR(curves.row(0.40).threshold, -1.5, 1e-6);
  // All that can go.
  EXPECT_GT(curves.row(0.5).threshold, -1);
  EXPECT_LT(curves.row(0.5).threshold, -0.999);
  EXPECT_EQ(curves.row(0.5).mean, 0.5);
  test::expect_error([&] { curves.row(0.51); },
                     {"0.51 cannot be reached", "0.5000 is the largest"});
  for (const double wrong : {0.0, 1.0, -0.5, std::nan("")}) {
    test::expect_error([&] { curves.row(wrong); }, {"above 0 and below 1"});
  }
}

TEST(EvictRatioCurves, MeanOverTextsNotOverPairs) {
  EvictRatioCurves curves(1, Communicator::self());
  curves.add_text(1, {{-1}});
  curves.add_text(100, {std::vector<float>(100, -5)});
  EXPECT_EQ(curves.mean(-3), 0.5);
}

TEST(EvictRatioCurves, ThresholdsGiveTheirRatios) {
  EvictRatioCurves curves(8, Communicator::self(), 8192);
  std::vector<std::vector<float>> texts;
  for (unsigned t = 0; t < 5; ++t) {
    texts.push_back(normal_scores(8 * (900 + 10 * t), t, -4 + 0.3f * static_cast<float>(t)));
    curves.add_text(1000 + 10 * t, {texts.back()});
  }
  double before = -std::numeric_limits<double>::infinity();
  for (const double ratio : {0.01, 0.3, 0.5, 0.66, 0.75, 0.89}) {
    const ThresholdTable::Row row = curves.row(ratio);
    EXPECT_NEAR(row.mean, ratio, 1.0 / (8 * 1000));
    EXPECT_GT(row.threshold, before);
    before = row.threshold;
    EXPECT_EQ(row.threshold, static_cast<float>(row.threshold));
    double mean = 0;
    for (std::size_t t = 0; t < texts.size(); ++t) {
      const auto pairs = static_cast<std::int64_t>(8 * (1000 + 10 * t));
      mean += share_below(texts[t], static_cast<float>(row.threshold), pairs) / 5;
    }
    EXPECT_NEAR(row.mean, mean, 1e-12);
  }
}

// Of many scores a few are kept; what they give is as near as promised.
TEST(EvictRatioCurves, Sampled) {
  for (const std::int64_t most : {2, 64, 1000}) {
    EvictRatioCurves curves(4, Communicator::self(), most);
    const std::vector<float> scores = normal_scores(4 * 5000, 11);
    curves.add_text(5000, {scores});
    double before = 0;
    for (float threshold = -12; threshold < 4; threshold += test::watched ? 0.1f : 0.01f) {
      const double ratio = curves.evict_ratios(threshold).front();
      EXPECT_NEAR(ratio, share_below(scores, threshold, 4 * 5000), 1.0 / static_cast<double>(most));
      EXPECT_GE(ratio, before);
      before = ratio;
    }
    EXPECT_EQ(before, 1);
    EXPECT_EQ(curves.mean(-20), 0);
  }
}

TEST(EvictRatioCurves, ScoresThatAreAllAlike) {
  EvictRatioCurves curves(1, Communicator::self());
  curves.add_text(10, {std::vector<float>(8, -3)});
  EXPECT_EQ(curves.row(0.6).mean, 0.8);
  EXPECT_EQ(curves.row(0.1).mean, 0);
  EXPECT_LE(curves.row(0.1).threshold, -3);
  EXPECT_GT(curves.row(0.6).threshold, -3);
  EXPECT_TRUE(std::isfinite(curves.row(0.6).threshold));
  EvictRatioCurves none(1, Communicator::self());
  test::expect_error([&] { none.row(0.5); }, {"no texts"});
  test::expect_error([&] { none.add_text(0, {}); }, {"no tokens"});
}

}  // namespace
}  // namespace kvzap
