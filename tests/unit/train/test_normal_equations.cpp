#include <gtest/gtest.h>

#include <random>

#include "train/normal_equations.hpp"

namespace kvzap::train {
namespace {

void check_sums(std::int64_t inputs, std::int64_t heads, std::int64_t rows, double tolerance) {
  const Kokkos::View<half**, Kokkos::LayoutRight, MemorySpace> hidden("hidden", rows, inputs);
  const linalg::Matrix scores("scores", rows, heads);
  const Kokkos::View<std::int64_t*, MemorySpace> order("order", rows - 1);
  const auto x = Kokkos::create_mirror_view(hidden);
  const auto y = Kokkos::create_mirror_view(scores);
  const auto o = Kokkos::create_mirror_view(order);
  std::mt19937 random(2);
  const auto number = [&] { return static_cast<float>(random() >> 8) / 8388608.0f - 1; };
  std::vector<float> shift;
  for (std::int64_t c = 0; c < inputs + heads; ++c) shift.push_back(0.3f * number());
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t c = 0; c < inputs; ++c) x(i, c) = half(number());
    for (std::int64_t h = 0; h < heads; ++h) y(i, h) = number();
    if (i > 0) o(i - 1) = i;  // all but the first
  }
  Kokkos::deep_copy(hidden, x);
  Kokkos::deep_copy(scores, y);
  Kokkos::deep_copy(order, o);
  NormalEquations equations(inputs, heads, shift);
  equations.add(ExecutionSpace(), hidden, scores, order);
  equations.add(ExecutionSpace(), hidden, scores, order);
  const auto sums = equations.sums();
  const std::int64_t columns = inputs + heads + 1;
  const auto z = [&](std::int64_t i, std::int64_t c) -> double {
    if (c == inputs + heads) return 1;
    const double value = c < inputs ? static_cast<float>(x(i, c)) : y(i, c - inputs);
    return value - shift[c];
  };
  // A few of every row, the diagonal and the last columns among them.
  for (std::int64_t r = 0; r < columns; r += 1 + inputs / 61) {
    for (std::int64_t c = r; c < columns; c += (c == r || c + 5 >= columns) ? 1 : inputs / 7) {
      double sum = 0;
      for (std::int64_t i = 1; i < rows; ++i) sum += 2 * z(i, r) * z(i, c);
      EXPECT_NEAR(sums(r, c), sum, tolerance) << r << ", " << c;
    }
  }
}

TEST(NormalEquations, AreDoubleUpToAThousandInputs) { check_sums(40, 3, 5000, 1e-9); }

// Two blocks, tiles of all shapes, and more than one sum of floats.
TEST(NormalEquations, AreFloatBlockByBlockAbove) {
  check_sums(NormalEquations::tile + 70, 2, NormalEquations::block_rows + 300, 2e-2);
}

}  // namespace
}  // namespace kvzap::train
