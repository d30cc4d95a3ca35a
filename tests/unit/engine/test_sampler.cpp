#include <gtest/gtest.h>

#include <cmath>
#include <kvzap/sampler.hpp>
#include <limits>
#include <map>

#include "unit/temporary_folder.hpp"

namespace kvzap {
namespace {

std::map<TokenId, double> frequencies(const SamplingOptions& options,
                                      const std::vector<float>& logits, int draws) {
  Sampler sampler(options);
  std::map<TokenId, double> result;
  for (int i = 0; i < draws; ++i) result[sampler(logits)] += 1.0 / draws;
  return result;
}

TEST(Sampler, GreedyTakesTheSmallerOfEqualIds) {
  Sampler sampler({});
  EXPECT_EQ(sampler({0, 3, 1, 3}), 1);
  EXPECT_EQ(sampler({-std::numeric_limits<float>::infinity(), -2}), 1);
}

TEST(Sampler, RefusesLogitsThatAreNoNumbers) {
  Sampler sampler({});
  EXPECT_EQ(sampler({0, std::nanf(""), 9}), -1);
  EXPECT_EQ(sampler({-std::numeric_limits<float>::infinity()}), -1);
  EXPECT_EQ(sampler({}), -1);
}

// Frequencies over many draws against the softmax that the options describe: 20000 draws put the
// standard error below 0.0036.
TEST(Sampler, DrawsFromTheSoftmaxThatIsLeft) {
  const std::vector<float> logits = {1.0f, 2.0f, 0.5f, 3.0f, -1.0f};
  const auto expect = [&](const SamplingOptions& options, const std::vector<TokenId>& kept) {
    double sum = 0;
    for (TokenId id : kept) sum += std::exp(logits[id] / options.temperature);
    const auto found = frequencies(options, logits, 20000);
    EXPECT_EQ(found.size(), kept.size());
    for (TokenId id : kept) {
      ASSERT_TRUE(found.count(id)) << id;
      EXPECT_NEAR(found.at(id), std::exp(logits[id] / options.temperature) / sum, 0.015) << id;
    }
  };
  expect({1.0, 0, 1.0, 1}, {0, 1, 2, 3, 4});
  expect({2.0, 3, 1.0, 2}, {3, 1, 0});
  // Probabilities at temperature 1: 3 has 0.62, 1 has 0.23, 0 has 0.084, 2 has 0.051, 4 has 0.011.
  expect({1.0, 0, 0.8, 3}, {3, 1});
  expect({1.0, 0, 0.6, 4}, {3});
  expect({1.0, 2, 0.99, 5}, {3, 1});
}

TEST(Sampler, SeedsDecide) {
  const std::vector<float> logits(1000, 0.0f);
  const auto draws = [&](std::uint64_t seed) {
    Sampler sampler({1.0, 0, 1.0, seed});
    std::vector<TokenId> ids;
    for (int i = 0; i < 50; ++i) ids.push_back(sampler(logits));
    return ids;
  };
  EXPECT_EQ(draws(7), draws(7));
  EXPECT_NE(draws(7), draws(8));
}

TEST(Sampler, RefusesOptionsOutOfRange) {
  const double nan = std::nan("");
  test::expect_error([] { Sampler({-1.0, 0, 1.0, 0}); }, {"--temp", "-1"});
  test::expect_error([&] { Sampler({nan, 0, 1.0, 0}); }, {"--temp", "nan"});
  test::expect_error([] { Sampler({1.0, -2, 1.0, 0}); }, {"--top-k", "-2"});
  test::expect_error([] { Sampler({1.0, 0, 0.0, 0}); }, {"--top-p", "0"});
  test::expect_error([] { Sampler({1.0, 0, 1.5, 0}); }, {"--top-p", "1.5"});
  test::expect_error([&] { Sampler({1.0, 0, nan, 0}); }, {"--top-p", "nan"});
}

}  // namespace
}  // namespace kvzap
