#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <kvzap/lab/train.hpp>
#include <limits>

#include "golden/golden_files.hpp"
#include "train/lapack.hpp"
#include "unit/temporary_folder.hpp"
#include "unit/train/memory_pairs.hpp"

namespace kvzap {
namespace {

using test::expect_error;
using test::MemoryPairs;

PairSplit no_validation(const PairSource& source) { return split_pairs(source.info(), 0, 0); }

/// Ridge regression by its definition, in double: Gauss elimination of the centred normal
/// equations.
struct Reference {
  std::vector<double> weight, bias;  // (heads, inputs), (heads)
};
Reference solve(MemoryPairs& pairs, int layer, const std::vector<bool>& used, double alpha) {
  const auto inputs = pairs.info().hidden_size;
  const int heads = pairs.info().kv_heads;
  std::vector<double> x_mean(inputs), y_mean(heads);
  double count = 0;
  for (std::int64_t p = 0; p < pairs.info().pairs; ++p) count += used[p] ? 1 : 0;
  for (std::int64_t p = 0; p < pairs.info().pairs; ++p) {
    if (!used[p]) continue;
    for (std::int64_t c = 0; c < inputs; ++c) x_mean[c] += pairs.hidden(layer, p, c) / count;
    for (int h = 0; h < heads; ++h) y_mean[h] += pairs.score(layer, p, h) / count;
  }
  Reference reference;
  for (int h = 0; h < heads; ++h) {
    std::vector<std::vector<double>> a(inputs, std::vector<double>(inputs + 1));
    for (std::int64_t i = 0; i < inputs; ++i) {
      a[i][i] = alpha;
      for (std::int64_t p = 0; p < pairs.info().pairs; ++p) {
        if (!used[p]) continue;
        const double x = pairs.hidden(layer, p, i) - x_mean[i];
        for (std::int64_t j = 0; j < inputs; ++j) {
          a[i][j] += x * (pairs.hidden(layer, p, j) - x_mean[j]);
        }
        a[i][inputs] += x * (pairs.score(layer, p, h) - y_mean[h]);
      }
    }
    for (std::int64_t i = 0; i < inputs; ++i) {
      for (std::int64_t k = 0; k < inputs; ++k) {
        if (k == i) continue;
        const double factor = a[k][i] / a[i][i];
        for (std::int64_t j = i; j <= inputs; ++j) a[k][j] -= factor * a[i][j];
      }
    }
    double bias = y_mean[h];
    for (std::int64_t i = 0; i < inputs; ++i) {
      reference.weight.push_back(a[i][inputs] / a[i][i]);
      bias -= reference.weight.back() * x_mean[i];
    }
    reference.bias.push_back(bias);
  }
  return reference;
}

void expect_near(const std::vector<float>& found, const std::vector<double>& wanted,
                 double tolerance) {
  ASSERT_EQ(found.size(), wanted.size());
  double largest = 0;
  for (const double value : wanted) largest = std::max(largest, std::fabs(value));
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_NEAR(found[i], wanted[i], tolerance * largest) << i;
  }
}

TEST(Ridge, HasTheGoldenCoefficients) {
  const auto file = SafetensorsFolder::open(golden::golden_dir / "pairs/ridge.safetensors");
  for (const int layer : {1, 4}) {
    const std::string name = std::to_string(layer);
    const TensorInfo* const x = file.find(name + ".x");
    const auto y = golden::tensor<float>(file, name + ".y");
    const std::int64_t count = x->shape.at(0), inputs = x->shape.at(1);
    const auto heads = static_cast<int>(static_cast<std::int64_t>(y.size()) / count);
    MemoryPairs pairs(count, 1, inputs, heads);
    for (std::int64_t i = 0; i < count * inputs; ++i) {
      bfloat16 value;
      std::memcpy(&value, x->data + i * sizeof(value), sizeof(value));
      pairs.hidden(0, i / inputs, i % inputs) = value;
    }
    for (std::int64_t i = 0; i < count * heads; ++i) pairs.score(0, i / heads, i % heads) = y[i];
    const auto trained = train_ridge(pairs, 0, no_validation(pairs), {});
    ASSERT_TRUE(trained);
    expect_near(trained->surrogate.weight1, golden::tensor<double>(file, name + ".weight"), 1e-4);
    expect_near(trained->surrogate.bias1, golden::tensor<double>(file, name + ".bias"), 1e-4);
    EXPECT_GT(trained->report.condition, 1);
    EXPECT_LT(trained->report.condition, ill_conditioned);
  }
}

TEST(Ridge, IsTheDefinitionForEveryTypeAndFarFromTheOrigin) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const float mean : {0.0f, 500.0f}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::to_string(mean));
      auto pairs = MemoryPairs::random(700, 2, 13, 3, dtype, mean);
      const PairSplit split = split_pairs(pairs.info(), 0.1, 3);
      std::vector<bool> used = split.is_validation;
      used.flip();
      const auto trained = train_ridge(pairs, 1, split, {2.5});
      ASSERT_TRUE(trained);
      const Reference reference = solve(pairs, 1, used, 2.5);
      expect_near(trained->surrogate.weight1, reference.weight, 2e-5);
      expect_near(trained->surrogate.bias1, reference.bias, 2e-5);

      double squares = 0;
      for (std::int64_t p = 0; p < 700; ++p) {
        for (int h = 0; h < 3 && used[p]; ++h) {
          double error = reference.bias[h] - pairs.score(1, p, h);
          for (int c = 0; c < 13; ++c)
            error += reference.weight[h * 13 + c] * pairs.hidden(1, p, c);
          squares += error * error;
        }
      }
      EXPECT_EQ(trained->report.training, 630);
      EXPECT_EQ(trained->report.validation, 70);
      EXPECT_NEAR(trained->report.training_mse, squares / (630 * 3), 1e-4 * squares / (630 * 3));
      EXPECT_GT(trained->report.r2.at(2), 0.5);
    }
  }
}

/// As hidden states are: far from the origin, a few directions that hold most of the variance, a
/// few columns that are larger than all others.
MemoryPairs like_hidden_states(std::int64_t count, std::int64_t inputs, DType dtype) {
  MemoryPairs pairs(count, 1, inputs, 2, dtype);
  std::mt19937 random(5);
  const auto number = [&] { return static_cast<float>(random() >> 8) / 8388608.0f - 1; };
  constexpr int directions = 24;
  std::vector<float> mixing(directions * inputs), mean(inputs), scale(inputs, 1.0f);
  for (std::int64_t i = 0; i < directions * inputs; ++i) {
    mixing[i] = number() / std::sqrt(static_cast<float>(1 + i / inputs));
  }
  for (float& value : mean) value = 3 * number();
  for (const int column : {17, 348, 679}) scale[column] = 20;
  for (std::int64_t p = 0; p < count; ++p) {
    std::vector<float> row = mean;
    for (int k = 0; k < directions; ++k) {
      const float factor = 2 * number();
      for (std::int64_t c = 0; c < inputs; ++c) row[c] += factor * mixing[k * inputs + c];
    }
    float sum = 0;
    for (std::int64_t c = 0; c < inputs; ++c) {
      pairs.hidden(0, p, c) = pairs.rounded(row[c] * scale[c]);
      sum += (c % 3 == 0 ? 0.02f : -0.01f) * row[c];
    }
    for (int h = 0; h < 2; ++h) {
      pairs.score(0, p, h) = sum + std::fabs(sum) - static_cast<float>(3 + h) + 0.3f * number();
    }
  }
  return pairs;
}

/// The solution of normal equations that are double throughout.
Reference solve_in_double(MemoryPairs& pairs, double alpha) {
  const std::int64_t count = pairs.info().pairs, inputs = pairs.info().hidden_size;
  const int heads = pairs.info().kv_heads;
  const std::int64_t columns = inputs + heads;
  std::vector<double> z(count * columns), means(columns), sums(columns * columns);
  for (std::int64_t p = 0; p < count; ++p) {
    for (std::int64_t c = 0; c < columns; ++c) {
      z[p * columns + c] =
          c < inputs ? pairs.hidden(0, p, c) : pairs.score(0, p, static_cast<int>(c - inputs));
      means[c] += z[p * columns + c] / static_cast<double>(count);
    }
  }
  for (std::int64_t i = 0; i < count * columns; ++i) z[i] -= means[i % columns];
  train::add_symmetric_products(z.data(), count, columns, sums.data());
  Reference reference;
  for (int h = 0; h < heads; ++h) {
    for (std::int64_t c = 0; c < inputs; ++c) {
      reference.weight.push_back(sums[c * columns + inputs + h]);
    }
  }
  for (std::int64_t c = 0; c < inputs; ++c) sums[c * columns + c] += alpha;
  EXPECT_EQ(train::solve_cholesky(sums.data(), inputs, columns, reference.weight.data(), heads)
                .failed_pivot,
            0);
  for (int h = 0; h < heads; ++h) {
    double bias = means[inputs + h];
    for (std::int64_t c = 0; c < inputs; ++c) {
      bias -= reference.weight[h * inputs + c] * means[c];
    }
    reference.bias.push_back(bias);
  }
  return reference;
}

void expect_double_solution(MemoryPairs& pairs, double alpha) {
  const auto trained = train_ridge(pairs, 0, no_validation(pairs), {alpha});
  ASSERT_TRUE(trained);
  const Reference reference = solve_in_double(pairs, alpha);
  expect_near(trained->surrogate.weight1, reference.weight, 5e-4);
  expect_near(trained->surrogate.bias1, reference.bias, 5e-4);
  const std::int64_t count = pairs.info().pairs, inputs = pairs.info().hidden_size;
  double squares = 0;
  for (std::int64_t p = 0; p < count; ++p) {
    for (int h = 0; h < 2; ++h) {
      double error = reference.bias[h] - pairs.score(0, p, h);
      for (std::int64_t c = 0; c < inputs; ++c) {
        error += reference.weight[h * inputs + c] * pairs.hidden(0, p, c);
      }
      squares += error * error;
    }
  }
  const double mse = squares / static_cast<double>(2 * count);
  EXPECT_NEAR(trained->report.training_mse, mse, 1e-3 * mse);
}

// Sums of float lose the digits of directions in which hidden states hardly vary; they come back.
TEST(Ridge, KeepsDigitsAboveAThousandInputs) {
  auto pairs = like_hidden_states(6000, 1040, DType::bf16);
  expect_double_solution(pairs, 1);
}

// Too few digits to factor the matrix at all, or to improve on: sums of double instead.
TEST(Ridge, SolvesInDoubleWhatFloatCannot) {
  auto pairs = like_hidden_states(2000, 1040, DType::f32);
  expect_double_solution(pairs, 1e-3);
}

TEST(Ridge, LeavesOutPairsThatAreNotFinite) {
  auto pairs = MemoryPairs::random(200, 1, 7, 2);
  std::vector<bool> used(200, true);
  const float infinity = std::numeric_limits<float>::infinity();
  pairs.hidden(0, 10, 3) = std::nanf("");
  pairs.score(0, 20, 1) = -infinity;
  used[10] = used[20] = false;
  const auto trained = train_ridge(pairs, 0, no_validation(pairs), {});
  ASSERT_TRUE(trained);
  EXPECT_EQ(trained->report.dropped, 2);
  EXPECT_EQ(trained->report.training, 198);
  expect_near(trained->surrogate.weight1, solve(pairs, 0, used, 1).weight, 2e-5);
  for (std::int64_t p = 0; p < 200; ++p) pairs.score(0, p, 0) = infinity;
  expect_error([&] { train_ridge(pairs, 0, no_validation(pairs), {}); }, {"layer 0", "200"});
}

TEST(Ridge, TellsASystemThatCannotBeSolved) {
  auto pairs = MemoryPairs::random(100, 1, 6, 1, DType::f32);
  for (std::int64_t p = 0; p < 100; ++p) pairs.hidden(0, p, 5) = pairs.hidden(0, p, 1);
  EXPECT_TRUE(train_ridge(pairs, 0, no_validation(pairs), {}));
  for (std::int64_t p = 0; p < 100; ++p) pairs.hidden(0, p, 5) = 0.5f;
  expect_error([&] { train_ridge(pairs, 0, no_validation(pairs), {0}); },
               {"layer 0", "not positive definite", "larger ridge"});
  const auto nearly = train_ridge(pairs, 0, no_validation(pairs), {1e-11});
  ASSERT_TRUE(nearly);
  EXPECT_GT(nearly->report.condition, ill_conditioned);
  expect_error([&] { train_ridge(pairs, 0, no_validation(pairs), {-1}); }, {"ridge is -1"});
}

TEST(Ridge, StopsIfAsked) {
  const auto pairs = MemoryPairs::random(100, 1, 6, 1);
  EXPECT_FALSE(train_ridge(pairs, 0, no_validation(pairs), {}, [] { return true; }));
}

TEST(Cholesky, SolvesAndEstimatesTheCondition) {
  // (3, 3) with stride 4; below the diagonal is what must not be read.
  std::vector<double> a = {4, 2, 0.5, -1, 9, 5, 1, -1, 9, 9, 3, -1};
  std::vector<double> b = {4 + 4 + 1.5, 2 + 10 + 3, 0.5 + 2 + 9};  // of (1, 2, 3)
  const auto result = train::solve_cholesky(a.data(), 3, 4, b.data(), 1);
  EXPECT_EQ(result.failed_pivot, 0);
  for (int i = 0; i < 3; ++i) EXPECT_NEAR(b[i], i + 1, 1e-14);
  EXPECT_GT(result.condition, 1);
  EXPECT_LT(result.condition, 10);
  std::vector<double> singular = {1, 1, 1, 1};
  EXPECT_EQ(train::solve_cholesky(singular.data(), 2, 2, b.data(), 1).failed_pivot, 2);
}

}  // namespace
}  // namespace kvzap
