// Products of rows with maps that a kernel chooses, against plain loops.
#include <gtest/gtest.h>

#include <kvzap/core/array_view.hpp>
#include <random>
#include <vector>

#include "base/team.hpp"
#include "linalg/device/chosen_products.hpp"

namespace kvzap {
namespace {

template <class Value>
void compare(std::int64_t inputs, std::int64_t outputs, bool has_bias) {
  constexpr std::int64_t maps = 5, tokens = 3, share = 2, rows = tokens * share;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const auto fill = [&](const auto& view) {
    for (std::size_t i = 0; i < view.size(); ++i) {
      using Element = std::decay_t<decltype(view.data()[0])>;
      view.data()[i] = static_cast<Element>(normal(random));
    }
  };
  std::vector<linalg::LinearWeights> weights;
  std::vector<linalg::ConstVector> biases;
  for (std::int64_t m = 0; m < maps; ++m) {
    weights.emplace_back(linalg::WeightLayout::rows, DTypeOf<Value>::value, outputs, inputs,
                         linalg::Bytes("weights", outputs * inputs * sizeof(Value)));
    fill(weights.back().rows<Value>());
    const linalg::Vector bias("bias", has_bias ? outputs : 0);
    fill(bias);
    biases.emplace_back(bias);
  }
  std::vector<const linalg::LinearWeights*> pointers;
  for (const auto& map : weights) pointers.push_back(&map);
  const linalg::Matrix x("x", tokens, inputs), y("y", rows, outputs);
  fill(x);
  const Kokkos::View<std::int64_t*, MemorySpace> chosen("chosen", rows);
  for (std::int64_t i = 0; i < rows; ++i) chosen(i) = (i * 3 + 1) % maps;
  const ExecutionSpace exec;
  linalg::ChosenMaps(pointers, biases)(exec, x, share, chosen, y);
  exec.fence();
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t n = 0; n < outputs; ++n) {
      double sum = has_bias ? biases[chosen(i)](n) : 0;
      for (std::int64_t k = 0; k < inputs; ++k) {
        const float own = x(i / share, k);
        sum += double{static_cast<float>(weights[chosen(i)].rows<Value>()(n, k))} *
               (std::is_same_v<Value, bfloat16> ? static_cast<float>(bfloat16(own)) : own);
      }
      EXPECT_NEAR(y(i, n), sum, 1e-4) << i << ", " << n << " of " << inputs << " inputs";
    }
  }
}

TEST(ChosenMaps, AgreeWithPlainLoops) {
  if (!base::runs_on_host) GTEST_SKIP() << "reads memory of the device";
  for (const base::TeamShape& shape : {base::TeamShape{1, 1}, base::TeamShape{0, 0}}) {
    base::set_team_shape(shape);
    for (const bool has_bias : {false, true}) {
      for (const std::int64_t inputs : {64, 67}) {
        compare<float>(inputs, 11, has_bias);
        compare<bfloat16>(inputs, 11, has_bias);
        compare<half>(inputs, 11, has_bias);
      }
    }
  }
  base::set_team_shape({0, 0});
}

}  // namespace
}  // namespace kvzap
