// Scores by a surrogate in the caller's views against loops in double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <kvzap/core/score.hpp>
#include <vector>

#include "unit/core/caller_views.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using kvzap::LinearSurrogate;
using kvzap::MlpSurrogate;
using namespace kvzap::test;

/// x (row, input) times the transpose of weight (output, input), plus bias (output).
std::vector<double> linear(const std::vector<double>& x, const HostArray& weight,
                           const HostArray& bias) {
  const std::size_t inputs = weight.extents[1], outputs = weight.extents[0];
  std::vector<double> result;
  for (std::size_t row = 0; row * inputs < x.size(); ++row) {
    for (std::size_t out = 0; out < outputs; ++out) {
      double sum = bias(out, 0);
      for (std::size_t in = 0; in < inputs; ++in) sum += x[row * inputs + in] * weight(out, in);
      result.push_back(sum);
    }
  }
  return result;
}

template <class CallerOf>
class ScoreCallerViews : public ::testing::Test {};
TYPED_TEST_SUITE(ScoreCallerViews, Callers);

TYPED_TEST(ScoreCallerViews, AgreeWithLoops) {
  using Value = typename TypeParam::Value;
  using Layout = typename TypeParam::Layout;
  using Space = typename TypeParam::Space;
  const typename TypeParam::Exec exec;
  std::mt19937 random(1);
  const auto matrix = [](const HostArray& array) { return matrix_of<Value, Layout, Space>(array); };
  for (const std::size_t tokens : {0, 1, 2, 67}) {
    for (const std::size_t heads : {0, 1, 5}) {
      SCOPED_TRACE(std::to_string(tokens) + " tokens, " + std::to_string(heads) + " heads");
      const std::size_t inputs = 24, units = 7;
      const auto hidden = random_array<Value>(tokens, inputs, 1, random);
      const auto weight = random_array<Value>(heads, inputs, 1, random);
      const auto bias = random_array<Value>(heads, 1, 1, random);
      const auto hidden_weight = random_array<Value>(units, inputs, 1, random);
      const auto hidden_bias = random_array<Value>(units, 1, 1, random);
      const auto last_weight = random_array<Value>(heads, units, 1, random);
      const std::vector<double> x(hidden.values.begin(), hidden.values.end());

      const auto scores = matrix_of<float, Layout, Space>(HostArray(heads, tokens, 1));
      const auto expect_scores = [&](const std::vector<double>& expected) {
        exec.fence();
        const auto found = on_host(exec, scores);
        for (std::size_t h = 0; h < heads; ++h) {
          for (std::size_t t = 0; t < tokens; ++t) {
            EXPECT_NEAR(found(h, t), expected[t * heads + h], 2e-5) << h << ", " << t;
          }
        }
      };
      const auto bias_view = vector_of<Value, Space>(bias);
      kvzap::score(exec, matrix(hidden), LinearSurrogate{matrix(weight), bias_view}, scores);
      expect_scores(linear(x, weight, bias));
      kvzap::score(exec, matrix(hidden),
                   MlpSurrogate{matrix(hidden_weight), vector_of<Value, Space>(hidden_bias),
                                matrix(last_weight), bias_view},
                   scores);
      auto activation = linear(x, hidden_weight, hidden_bias);
      for (double& a : activation) a = 0.5 * a * (1 + std::erf(a / std::sqrt(2.0)));
      expect_scores(linear(activation, last_weight, bias));
    }
  }
}

TEST(ScoreCallerViews, PartsOfWiderMatricesAreReadInPlace) {
  using Exec = Kokkos::DefaultExecutionSpace;
  using Space = Exec::memory_space;
  const Exec exec;
  std::mt19937 random(2);
  const auto all = random_array<float>(40, 30, 1, random);
  const auto right = matrix_of<float, Kokkos::LayoutRight, Space>(all);
  const auto left = matrix_of<float, Kokkos::LayoutLeft, Space>(all);
  const auto weight = random_array<float>(3, 16, 1, random);
  const auto bias = random_array<float>(3, 1, 1, random);
  const LinearSurrogate surrogate{matrix_of<float, Kokkos::LayoutRight, Space>(weight),
                                  vector_of<float, Space>(bias)};
  std::vector<double> x;
  for (std::size_t t = 0; t < 21; ++t) {
    for (std::size_t i = 0; i < 16; ++i) x.push_back(all(10 + t, 7 + i));
  }
  const auto expected = linear(x, weight, bias);
  const auto expect_same = [&](const auto& matrix) {
    const auto part =
        Kokkos::subview(matrix, std::pair<int, int>(10, 31), std::pair<int, int>(7, 23));
    const Kokkos::View<float**, Space> scores("scores", 3, 21);
    kvzap::score(exec, part, surrogate, scores);
    const auto found = on_host(exec, scores);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(found(i % 3, i / 3), expected[i], 2e-5);
    }
  };
  expect_same(right);
  expect_same(left);
}

TEST(ScoreCallerViews, ErrorsNameTheArgument) {
  using Exec = Kokkos::DefaultExecutionSpace;
  const auto matrix = [](int a, int b) {
    return Kokkos::View<float**, Exec::memory_space>("matrix", a, b);
  };
  const auto vector = [](int a) { return Kokkos::View<float*, Exec::memory_space>("vector", a); };
  const auto linear = [&](int heads, int inputs, int biases, int tokens) {
    kvzap::score(Exec(), matrix(5, 8), LinearSurrogate{matrix(heads, inputs), vector(biases)},
                 matrix(2, tokens));
  };
  expect_error([&] { linear(2, 7, 2, 5); },
               {"score: weight is (2, 7); expected (2, 8) = (KV head, hidden_size)"});
  expect_error([&] { linear(3, 8, 2, 5); }, {"score: weight is (3, 8); expected (2, 8)"});
  expect_error([&] { linear(2, 8, 2, 6); },
               {"score: scores is (2, 6); expected (2, 5) = (KV head, token)"});
  expect_error(
      [&] {
        kvzap::score(Exec(), matrix(5, 8),
                     MlpSurrogate{matrix(4, 8), vector(3), matrix(2, 3), vector(2)}, matrix(2, 5));
      },
      {"score: hidden_weight is (4, 8); expected (3, 8) = (unit, hidden_size)"});
}

}  // namespace
