// Kernels of layers' inputs, residual streams and cut gates against plain loops.
#include <gtest/gtest.h>

#include <cmath>

#include "engine/stream_kernels.hpp"
#include "one_step.hpp"

namespace kvzap {
namespace {

using linalg::Matrix;
using test::Numbers;
using test::on_host;
using test::some_numbers;

constexpr std::int64_t rows = 3, columns = 37, streams = 4, active = 1;

Matrix filled(std::int64_t m, std::int64_t n, double scale = 1, std::size_t skipped = 0) {
  const Matrix matrix("matrix", m, n);
  Numbers numbers = some_numbers(skipped + m * n, scale);
  test::fill(matrix, {numbers.begin() + static_cast<std::ptrdiff_t>(skipped), numbers.end()});
  return matrix;
}

void expect_near(const Matrix& found, const Numbers& expected, double tolerance = 1e-5) {
  const Numbers numbers = on_host(found);
  ASSERT_EQ(numbers.size(), expected.size());
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    EXPECT_NEAR(numbers[i], expected[i], tolerance) << i;
  }
}

TEST(StreamKernels, JoinsInputs) {
  constexpr std::int64_t own = 5, size = 9, first = 3;
  const Matrix gates = filled(rows, own), projected = filled(rows, size, 1, 7),
               table = filled(rows, own, 1, 11), joined("joined", rows, 2 * own);
  engine::join_inputs(ExecutionSpace(), {gates, projected, table, first, 3, 0.5F}, joined);
  const Numbers g = on_host(gates), p = on_host(projected), t = on_host(table);
  Numbers expected(rows * 2 * own);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < own; ++c) {
      expected[r * 2 * own + c] = g[r * own + c];
      expected[r * 2 * own + own + c] = (p[r * size + first + c] + 3 * t[r * own + c]) / 2;
    }
  }
  expect_near(joined, expected);
}

TEST(StreamKernels, CutsRowsByMeanAndDeviation) {
  constexpr std::int64_t cut = 20;
  const Matrix x = filled(rows, columns), means("means", rows, 1), variances("variances", rows, 1);
  Numbers expected = on_host(x);
  const ExecutionSpace exec;
  engine::sum_rows(exec, x, cut, {}, false, means);
  Kokkos::fence();
  Numbers sums = on_host(means);
  for (std::int64_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (std::int64_t c = 0; c < cut; ++c) sum += expected[r * columns + c];
    EXPECT_NEAR(sums[r], sum, 1e-5);
    sums[r] = sum / cut;
  }
  test::fill(means, sums);
  engine::sum_rows(exec, x, cut, means, true, variances);
  Kokkos::fence();
  Numbers squares = on_host(variances);
  for (std::int64_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (std::int64_t c = 0; c < cut; ++c) sum += std::pow(expected[r * columns + c] - sums[r], 2);
    EXPECT_NEAR(squares[r], sum, 1e-4);
    squares[r] = sum / cut;
    for (std::int64_t c = 0; c < cut; ++c) {
      double& value = expected[r * columns + c];
      value = std::max(0.0, value - sums[r] - 0.5 * std::sqrt(squares[r]));
    }
  }
  test::fill(variances, squares);
  engine::cut_rows(exec, x, cut, means, variances, 0.5F);
  expect_near(x, expected);
}

/// All streams, and where kernels find them.
struct Streams {
  Matrix values = filled(streams * rows, columns, 1, 5);
  engine::StreamRows view{values.data(), rows* columns, streams, rows, columns};
  Numbers before = on_host(values);
  double at(std::int64_t s, std::int64_t r, std::int64_t c) const {
    return before[(s * rows + r) * columns + c];
  }
};

TEST(StreamKernels, MixesAndCorrectsStreams) {
  const ExecutionSpace exec;
  const Streams mixed;
  const Matrix factors = filled(rows, streams * streams, 0.3), h("h", rows, columns);
  engine::mix_streams(exec, mixed.view, factors, active, h);
  const Numbers f = on_host(factors);
  Numbers expected = mixed.before;
  for (std::int64_t s = 0; s < streams; ++s) {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < columns; ++c) {
        for (std::int64_t j = 0; j < streams; ++j) {
          expected[(s * rows + r) * columns + c] +=
              f[r * streams * streams + s * streams + j] * mixed.at(j, r, c);
        }
      }
    }
  }
  expect_near(mixed.values, expected);
  expect_near(h, {expected.begin() + active * rows * columns,
                  expected.begin() + (active + 1) * rows * columns});

  const Streams corrected;
  const Matrix output = filled(rows, columns, 2, 3), of_streams = filled(rows, streams, 0.3);
  const Matrix scale = filled(1, columns);
  const Numbers y = on_host(output), g = on_host(of_streams), by = on_host(scale);
  engine::correct_streams(exec, corrected.view, of_streams, active,
                          linalg::ConstVector(scale.data(), columns), output);
  expected = corrected.before;
  Numbers scaled(rows * columns);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) {
      const double change = y[r * columns + c] - corrected.at(active, r, c);
      for (std::int64_t s = 0; s < streams; ++s) {
        expected[(s * rows + r) * columns + c] += (1 + g[r * streams + s]) * change;
      }
      scaled[r * columns + c] = expected[(active * rows + r) * columns + c] * by[c];
    }
  }
  expect_near(corrected.values, expected);
  expect_near(output, scaled);
}

TEST(StreamKernels, MatchesMagnitudes) {
  const Matrix like = filled(rows, columns, 3), x = filled(rows, columns, 0.5, 9);
  Kokkos::deep_copy(Kokkos::subview(x, 2, Kokkos::ALL), 1e-9F);  // below the floor
  const Numbers wanted = on_host(like);
  Numbers expected = on_host(x);
  engine::match_magnitude(ExecutionSpace(), like, x);
  for (std::int64_t r = 0; r < rows; ++r) {
    double own = 0, other = 0;
    for (std::int64_t c = 0; c < columns; ++c) {
      own += std::pow(expected[r * columns + c], 2) / columns;
      other += std::pow(wanted[r * columns + c], 2) / columns;
    }
    for (std::int64_t c = 0; c < columns; ++c) {
      expected[r * columns + c] *= std::sqrt(other / std::max(own, 1e-5));
    }
  }
  expect_near(x, expected);
  const Matrix t = filled(rows, columns, 2);
  expected = on_host(t);
  for (double& value : expected) value = std::tanh(value);
  engine::tanh_rows(ExecutionSpace(), t);
  expect_near(t, expected);
}

}  // namespace
}  // namespace kvzap
