// Gates of attention's output against plain loops, by both kernels.
#include <gtest/gtest.h>

#include <cmath>

#include "base/machine.hpp"
#include "engine/attention_gates.hpp"
#include "one_step.hpp"

namespace kvzap {
namespace {

using engine::GateRule;
using linalg::Matrix;
using test::Numbers;
using test::on_host;

constexpr std::int64_t rows = 2;

void expect_gated(const Numbers& gates, std::int64_t columns, const GateRule& rule) {
  const auto count = static_cast<std::int64_t>(gates.size()) / rows;
  Numbers values, expected;
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    values.push_back(i == 0 ? 1e30 : static_cast<double>(i % 7) - 3);
    const double gate = gates[i / columns * count + (rule.skip + i % columns) / rule.dim];
    const double factor = rule.is_softplus
                              ? std::max(gate, 0.0) + std::log1p(std::exp(-std::fabs(gate)))
                              : 1 / (1 + std::exp(-gate));
    expected.push_back(values.back() * factor);
  }
  const bool before = base::machine().on_device();
  for (const bool device : {false, true}) {
    base::machine().set_device(device);
    const Matrix of_gates("gates", rows, count), y("y", rows, columns);
    test::fill(of_gates, gates);
    test::fill(y, values);
    engine::apply_gates(ExecutionSpace(), of_gates, rule, y);
    Kokkos::fence();
    const Numbers found = on_host(y);
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_NEAR(found[i], expected[i], 2e-6 * std::fabs(expected[i]) + 1e-30) << i;
    }
  }
  base::machine().set_device(before);
}

TEST(AttentionGates, OfEachDimension) {
  const Numbers gates = {-60, -40, -3, 0, 0.5, 30, 80, -9, 2, 1, -1, 7, -0.25, 12};
  expect_gated(gates, 7, {});
  GateRule rule;
  rule.is_softplus = true;
  expect_gated(gates, 7, rule);
}

TEST(AttentionGates, OfWholeHeadsAndOfParts) {
  const Numbers gates = {-40, -3, 0.5, 80, 2, -9};
  for (const bool is_softplus : {false, true}) {
    expect_gated(gates, 12, {4, 0, is_softplus});
    // A rank's inputs of o begin in the middle of the first head and end in that of the last one.
    expect_gated(gates, 8, {4, 3, is_softplus});
  }
}

}  // namespace
}  // namespace kvzap
