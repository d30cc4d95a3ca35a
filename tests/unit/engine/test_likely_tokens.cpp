#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "engine/likely_tokens.hpp"
#include "unit/attention/cases.hpp"

namespace kvzap {
namespace {

using engine::LikelyTokens;

TEST(LikelyTokens, AgreeWithSorting) {
  for (const base::SimdLevel level : test::attention::simd_levels<float>()) {
    const test::attention::LevelInUse in_use(level);
    std::mt19937 random(5);
    for (const std::size_t count : {1, 63, 64, 65, 1000, 151936}) {
      for (const bool has_ties : {false, true}) {
        std::normal_distribution<float> normal(0, 4);
        std::vector<float> logits(count);
        for (float& logit : logits) {
          logit = normal(random);
          if (has_ties) logit = std::round(logit);
        }
        if (count > 64) logits[count / 2] = -std::numeric_limits<float>::infinity();
        std::vector<TokenId> order(count);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](TokenId a, TokenId b) { return logits[a] > logits[b]; });
        LikelyTokens likely;
        likely.read(logits.data(), count);
        ASSERT_TRUE(likely.is_finite());
        EXPECT_EQ(likely.best(), order.front());
        EXPECT_EQ(likely.largest(), logits[order.front()]);
        for (const std::size_t wanted : {std::size_t{1}, std::size_t{20}, count / 3, count}) {
          const std::vector<TokenId>& found = likely.sorted(wanted);
          ASSERT_GE(found.size(), std::min(wanted, count));
          EXPECT_TRUE(std::equal(found.begin(), found.end(), order.begin())) << wanted;
        }
        for (const double temperature : {0.01, 0.7, 30.0}) {
          long double sum = 0;
          for (const float logit : logits) {
            sum += std::exp((static_cast<long double>(logit) - likely.largest()) / temperature);
          }
          EXPECT_NEAR(likely.total(temperature) / static_cast<double>(sum), 1, 1e-12)
              << count << " tokens at " << temperature;
        }
      }
    }
  }
}

TEST(LikelyTokens, AreFewWhereManyAreEqual) {
  std::vector<float> logits(32000, -std::numeric_limits<float>::infinity());
  logits[17] = 1;
  logits[31000] = 2;
  LikelyTokens likely;
  likely.read(logits.data(), logits.size());
  const std::vector<TokenId>& found = likely.sorted(20);
  EXPECT_EQ(found.size(), 20u);
  EXPECT_EQ(found[0], 31000);
  EXPECT_EQ(found[1], 17);
  EXPECT_EQ(found[2], 0);
  EXPECT_EQ(likely.total(1e-310), 1);
}

TEST(LikelyTokens, SeeWhatIsNotFinite) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const auto is_finite = [](const std::vector<float>& logits) {
    LikelyTokens likely;
    likely.read(logits.data(), logits.size());
    return likely.is_finite();
  };
  std::vector<float> logits(200, 1.0f);
  EXPECT_TRUE(is_finite(logits));
  logits[130] = -infinity;
  EXPECT_TRUE(is_finite(logits));
  logits[199] = std::nanf("");
  EXPECT_FALSE(is_finite(logits));
  logits[199] = infinity;
  EXPECT_FALSE(is_finite(logits));
  EXPECT_FALSE(is_finite(std::vector<float>(3, -infinity)));
  EXPECT_FALSE(is_finite({}));
}

}  // namespace
}  // namespace kvzap
