#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/simd.hpp"
#include "linalg/host/row_kernels.hpp"
#include "linalg/host/row_products.hpp"

namespace {

using kvzap::bfloat16;
using kvzap::half;
namespace base = kvzap::base;
namespace linalg = kvzap::linalg;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();
/// Written over what no kernel may touch.
constexpr float untouched = -12345.0f;

float uniform(std::mt19937& random) { return static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f; }

template <class Value>
std::vector<Value> random_values(std::mt19937& random, std::size_t count) {
  std::vector<Value> values(count);
  for (auto& value : values) value = Value(uniform(random));
  return values;
}

/// Rounding of a sum of `count` products of numbers up to 1, however it is ordered.
double tolerance(std::int64_t count) { return 1e-7 * (1.0 + static_cast<double>(count)); }

template <class Value>
class RowKernels : public ::testing::Test {};
using ValueTypes = ::testing::Types<float, half, bfloat16>;
TYPED_TEST_SUITE(RowKernels, ValueTypes);

// Lengths around the width of every instruction set, and odd ones.
const std::vector<int> lengths = {1, 3, 7, 16, 31, 32, 33, 64, 80, 97, 128, 255};

TYPED_TEST(RowKernels, WidenIsExact) {
  std::mt19937 random(21);
  for (int length : lengths) {
    const auto source = random_values<TypeParam>(random, length + 1);
    std::vector<float> target(length + 2, untouched);
    linalg::widen(source.data() + 1, target.data() + 1, length);
    EXPECT_EQ(target.front(), untouched);
    EXPECT_EQ(target.back(), untouched);
    for (int i = 0; i < length; ++i) {
      EXPECT_EQ(target[i + 1], static_cast<float>(source[i + 1]));
    }
  }
}

TYPED_TEST(RowKernels, SkinnyProduct) {
  std::mt19937 random(22);
  for (int dim : lengths) {
    for (int inputs = 1; inputs <= linalg::skinny_product_rows; ++inputs) {
      const int outputs = 17, weights_stride = dim + 3, inputs_stride = dim + 1, output_stride = 21;
      const auto weights = random_values<TypeParam>(random, outputs * weights_stride);
      const auto x = random_values<float>(random, inputs * inputs_stride);
      std::vector<float> y(inputs * output_stride, untouched);
      linalg::skinny_product(
          linalg::RowSpan<const float>{x.data(), inputs_stride, inputs},
          linalg::RowSpan<const TypeParam>{weights.data(), weights_stride, outputs}, dim, y.data(),
          output_stride);
      for (int m = 0; m < inputs; ++m) {
        for (int n = 0; n < output_stride; ++n) {
          double expected = n < outputs ? 0 : untouched;
          for (int k = 0; n < outputs && k < dim; ++k) {
            expected += double{weights[n * weights_stride + k]} * x[m * inputs_stride + k];
          }
          EXPECT_NEAR(y[m * output_stride + n], expected, tolerance(dim));
        }
      }
    }
  }
}

// Weights that are rounded to bf16 on the way give what rounded ones give.
TEST(RowKernelsFloat, SkinnyProductRoundsOnTheWay) {
  std::mt19937 random(29);
  for (int dim : lengths) {
    for (int inputs = 1; inputs <= linalg::skinny_product_rows; ++inputs) {
      const int outputs = 13;
      auto weights = random_values<float>(random, outputs * dim);
      weights[0] = infinity;
      weights[dim] = nan_value;
      weights[2 * dim] = 3.4e38f;                  // rounds to infinity
      const std::uint32_t all_ones = 0x7fffffffu;  // a NaN that carries into the sign if added to
      std::memcpy(&weights[3 * dim], &all_ones, sizeof(all_ones));
      std::vector<linalg::RoundedFloat> unrounded;
      std::vector<float> rounded;
      for (float weight : weights) {
        unrounded.push_back({weight});
        rounded.push_back(static_cast<float>(bfloat16(weight)));
      }
      const auto x = random_values<float>(random, inputs * dim);
      std::vector<float> y(inputs * outputs), expected(inputs * outputs);
      const linalg::RowSpan<const float> rows{x.data(), dim, inputs};
      linalg::skinny_product(
          rows, linalg::RowSpan<const linalg::RoundedFloat>{unrounded.data(), dim, outputs}, dim,
          y.data(), outputs);
      linalg::skinny_product(rows, linalg::RowSpan<const float>{rounded.data(), dim, outputs}, dim,
                             expected.data(), outputs);
      for (std::size_t i = 0; i < y.size(); ++i) {
        if (std::isfinite(expected[i])) {
          EXPECT_NEAR(y[i], expected[i], tolerance(dim));
        } else {
          EXPECT_EQ(std::isnan(y[i]), std::isnan(expected[i]));
          EXPECT_FALSE(std::isfinite(y[i]));
        }
      }
    }
  }
}

TEST(VectorKernels, MaxOfFindsTheLargestWhereverItIs) {
  std::mt19937 random(25);
  for (int length : lengths) {
    auto values = random_values<float>(random, length);
    for (auto& value : values) value -= 5;  // all negative: 0 must not win
    for (int at = 0; at < length; ++at) {
      auto copy = values;
      copy[at] = -0.5f;
      ASSERT_EQ(linalg::max_of(copy.data(), length), -0.5f) << length << " at " << at;
    }
    EXPECT_EQ(linalg::max_of(values.data(), length),
              *std::max_element(values.begin(), values.end()));
  }
  const std::vector<float> lowest(9, -infinity);
  EXPECT_EQ(linalg::max_of(lowest.data(), 9), -infinity);
}

// The result is rounded to a float (6e-8), and the range reduction and polynomial cost a little.
TEST(VectorKernels, ExpShiftedIsAccurate) {
  std::vector<float> points;
  std::mt19937 random(26);
  for (int i = 0; i < 400001; ++i) points.push_back(-87.0f * (i / 400000.0f));
  for (int i = 0; i < 100000; ++i) {  // every magnitude down to subnormals
    points.push_back(std::ldexp(-1.0f - 0.5f * (1 + uniform(random)), -(i % 149)));
  }
  for (int i = 0; i < 126; ++i) {  // where the range reduction changes its integer
    const auto edge = static_cast<float>(-(i + 0.5) * std::log(2.0));
    for (float x : {edge, std::nextafter(edge, 0.0f), std::nextafter(edge, -100.0f)}) {
      points.push_back(x);
    }
  }
  for (float shift : {0.0f, 3.25f}) {
    auto values = points;
    for (auto& value : values) value += shift;
    const auto given = values;
    const float sum =
        linalg::exp_shifted(values.data(), static_cast<std::int64_t>(values.size()), shift);
    double largest_error = 0;
    double expected_sum = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double expected = std::exp(double{given[i] - shift});
      expected_sum += expected;
      largest_error = std::max(largest_error, std::fabs(values[i] - expected) / expected);
    }
    EXPECT_LT(largest_error, 3e-7);
    EXPECT_NEAR(sum, expected_sum, 1e-3 * expected_sum);  // half a million rounded additions
  }
}

TEST(VectorKernels, ExpShiftedAtOddLengthsAndLimits) {
  for (int length : lengths) {
    std::vector<float> values(length + 2, untouched);
    double expected = 0;
    for (int i = 0; i < length; ++i) {
      values[i + 1] = -0.25f * i;
      expected += std::exp(-0.25 * i - 1);
    }
    EXPECT_NEAR(linalg::exp_shifted(values.data() + 1, length, 1.0f), expected, 1e-6 * expected);
    EXPECT_EQ(values.front(), untouched);
    EXPECT_EQ(values.back(), untouched);
    EXPECT_NEAR(values[1], std::exp(-1.0), 1e-7);
  }
  // What underflows is next to nothing, never negative, and -infinity is the limit of that.
  std::vector<float> low = {0, -88, -104, -1e4f, -3e38f, -infinity};
  EXPECT_EQ(linalg::exp_shifted(low.data(), 6, 0), 1.0f);
  EXPECT_EQ(low[0], 1.0f);
  for (int i = 1; i < 6; ++i) {
    EXPECT_GE(low[i], 0.0f);
    EXPECT_LT(low[i], 1.3e-38f);
  }
  for (int length : lengths) {
    std::vector<float> values(length, -1.0f);
    values[length / 2] = nan_value;
    EXPECT_TRUE(std::isnan(linalg::exp_shifted(values.data(), length, 0)));
    for (int i = 0; i < length; ++i) EXPECT_EQ(std::isnan(values[i]), i == length / 2);
  }
}

TEST(VectorKernels, Scale) {
  std::mt19937 random(27);
  for (int length : lengths) {
    const auto before = random_values<float>(random, length + 1);
    auto values = before;
    linalg::scale(values.data(), length, 0.75f);
    for (int i = 0; i < length; ++i) EXPECT_EQ(values[i], before[i] * 0.75f);
    EXPECT_EQ(values[length], before[length]);
  }
}

// Within 4 units in the last place, on both sides of the change from the polynomial.
TEST(VectorKernels, SoftCap) {
  std::vector<float> values;
  for (int i = -40000; i <= 40000; ++i) values.push_back(5e-3f * static_cast<float>(i));
  for (const float x : {1e-30f, -1e-6f, 31.2499f, 31.25f, -31.26f, 1e30f}) values.push_back(x);
  for (const float cap : {50.0f, 3.0f, 1.0f}) {
    auto result = values;
    linalg::soft_cap(result.data(), static_cast<std::int64_t>(result.size()), cap);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double expected = cap * std::tanh(double{values[i]} / cap);
      ASSERT_NEAR(result[i], expected, 4 * 0x1p-23 * std::fabs(expected)) << values[i];
    }
  }
  std::vector<float> special = {nan_value, infinity, -infinity, 0.0f};
  linalg::soft_cap(special.data(), 4, 2);
  EXPECT_TRUE(std::isnan(special[0]));
  EXPECT_EQ(special[1], 2);
  EXPECT_EQ(special[2], -2);
  EXPECT_EQ(special[3], 0);
}

TEST(VectorKernels, GeluTanhAndClampedSiluTimes) {
  std::vector<float> gate, up;
  for (int i = 0; i < 4001; ++i) {
    gate.push_back(12.0f * static_cast<float>(i - 2000) / 2000.0f);
    up.push_back(9.0f * static_cast<float>(i % 101 - 50) / 50.0f);
  }
  gate.insert(gate.end(), {1e30f, -1e30f, -infinity});
  up.insert(up.end(), {1, 1, 1});
  const auto count = static_cast<std::int64_t>(gate.size());
  std::vector<float> gelu(gate.size()), clamped(gate.size());
  linalg::gelu_tanh_times(gate.data(), up.data(), gelu.data(), count);
  linalg::clamped_silu_times(gate.data(), up.data(), 7, clamped.data(), count);
  for (std::size_t i = 0; i < gate.size(); ++i) {
    const double g = std::max(double{gate[i]}, -1e4), u = up[i], smaller = std::min(g, 7.0);
    const double by_tanh =
        0.5 * g * (1 + std::tanh(0.7978845608028654 * (g + 0.044715 * g * g * g))) * u;
    const double by_sigmoid =
        smaller / (1 + std::exp(-1.702 * smaller)) * (std::clamp(u, -7.0, 7.0) + 1);
    EXPECT_NEAR(gelu[i], by_tanh, 1e-6 * (1 + std::fabs(by_tanh))) << gate[i];
    EXPECT_NEAR(clamped[i], by_sigmoid, 1e-6 * (1 + std::fabs(by_sigmoid))) << gate[i];
  }
}

TEST(VectorKernels, SiluTimes) {
  std::mt19937 random(28);
  std::vector<float> gate, up;
  for (int i = 0; i < 20001; ++i) {
    gate.push_back(100.0f * (i - 10000) / 10000.0f);
    up.push_back(3 * uniform(random));
  }
  for (float x : {0.0f, -0.0f, 1e-30f, -1e-30f, 1e30f, -1e4f}) {
    gate.push_back(x);
    up.push_back(2);
  }
  for (std::size_t length : {std::size_t{1}, std::size_t{7}, std::size_t{33}, gate.size()}) {
    auto result = gate;
    linalg::silu_times(gate.data(), up.data(), result.data(), static_cast<std::int64_t>(length));
    for (std::size_t i = 0; i < gate.size(); ++i) {
      const double expected =
          i < length ? double{gate[i]} / (1 + std::exp(-double{gate[i]})) * up[i] : gate[i];
      // Below -87 the exact value is subnormal or nearly so.
      ASSERT_NEAR(result[i], expected, 1e-6 * std::fabs(expected) + 1e-33) << gate[i];
    }
  }
  std::vector<float> special = {nan_value, infinity, 1.0f};
  const std::vector<float> factors = {1, 1, nan_value};
  linalg::silu_times(special.data(), factors.data(), special.data(), 3);
  EXPECT_TRUE(std::isnan(special[0]));
  EXPECT_EQ(special[1], infinity);
  EXPECT_TRUE(std::isnan(special[2]));
}

TEST(RowKernelsFloat, GeluIsExactGelu) {
  std::vector<float> values;
  for (float x = -12; x <= 12; x += 0.013f) values.push_back(x);
  values.insert(values.end(), {0.0f, -0.0f, 1e-30f, 100.0f, -100.0f});
  auto result = values;
  linalg::gelu(result.data(), result.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double x = values[i];
    EXPECT_NEAR(result[i], 0.5 * x * (1 + std::erf(x / std::sqrt(2.0))), 3e-7 * (1 + std::fabs(x)));
  }
  float bad[] = {nan_value};
  linalg::gelu(bad, 1);
  EXPECT_TRUE(std::isnan(bad[0]));
}

TEST(RowKernelsFloat, RmsNormRotateAdd) {
  std::mt19937 random(77);
  for (int length : lengths) {
    const auto x = random_values<float>(random, length);
    const auto weight = random_values<float>(random, length);
    double sum = 0;
    for (float value : x) sum += double{value} * value;
    std::vector<float> y(length);
    linalg::rms_norm(x.data(), weight.data(), 1e-3f, y.data(), length);
    auto in_place = x;
    linalg::rms_norm(in_place.data(), weight.data(), 1e-3f, in_place.data(), length);
    EXPECT_EQ(in_place, y);
    for (int i = 0; i < length; ++i) {
      EXPECT_NEAR(y[i], x[i] / std::sqrt(sum / length + 1e-3) * weight[i], 2e-6);
    }
    auto total = x;
    linalg::add(total.data(), weight.data(), length);
    for (int i = 0; i < length; ++i) EXPECT_EQ(total[i], x[i] + weight[i]);

    const auto rows = random_values<float>(random, 2 * length);
    const auto angles = random_values<float>(random, 2 * length);
    auto rotated = rows;
    linalg::rotate(rotated.data(), angles.data(), length);
    for (int d = 0; d < length; ++d) {
      const double c = angles[2 * d], s = angles[2 * d + 1];
      EXPECT_NEAR(rotated[d], rows[d] * c - rows[d + length] * s, 1e-6);
      EXPECT_NEAR(rotated[d + length], rows[d + length] * c + rows[d] * s, 1e-6);
    }
  }
}

TEST(RowKernelsFloat, LayerNorm) {
  std::mt19937 random(78);
  for (int length : lengths) {
    auto x = random_values<float>(random, length);
    for (float& value : x) value += 3;
    const auto weight = random_values<float>(random, length);
    double mean = 0, squares = 0;
    for (float value : x) mean += value;
    mean /= length;
    for (float value : x) squares += (value - mean) * (value - mean);
    const double factor = 1 / std::sqrt(squares / length + 1e-3);
    std::vector<float> y(length + 1, untouched), plain(length);
    linalg::layer_norm(x.data(), weight.data(), 1e-3f, y.data(), length);
    linalg::layer_norm(x.data(), nullptr, 1e-3f, plain.data(), length);
    EXPECT_EQ(y.back(), untouched);
    for (int i = 0; i < length; ++i) {
      EXPECT_NEAR(y[i], (x[i] - mean) * factor * weight[i], 2e-5) << length;
      EXPECT_NEAR(plain[i], (x[i] - mean) * factor, 2e-5) << length;
    }
  }
}

TYPED_TEST(RowKernels, NarrowRoundsAsTheType) {
  std::mt19937 random(78);
  for (int length : lengths) {
    auto source = random_values<float>(random, length);
    source[0] = length % 2 ? nan_value : infinity;
    source.back() = 1e-42f;
    std::vector<TypeParam> target(length);
    linalg::narrow(source.data(), target.data(), length);
    for (int i = 0; i < length; ++i) {
      const float expected = static_cast<float>(TypeParam(source[i]));
      if (std::isnan(expected)) {
        EXPECT_TRUE(std::isnan(static_cast<float>(target[i])));
      } else {
        EXPECT_EQ(static_cast<float>(target[i]), expected);
      }
    }
  }
}

}  // namespace
