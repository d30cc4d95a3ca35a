#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/kokkos_compat.hpp"
#include "base/machine.hpp"
#include "base/simd.hpp"
#include "linalg/gemm.hpp"
#include "linalg/host/onednn.hpp"

namespace {

using kvzap::bfloat16;
using kvzap::ExecutionSpace;
using kvzap::half;
using kvzap::MemorySpace;
namespace base = kvzap::base;
namespace linalg = kvzap::linalg;

float uniform(std::mt19937& random) { return static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f; }

template <class Value>
using Storage = Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace>;

/// A (rows, columns) matrix inside a wider one.
template <class Value>
struct Part {
  Storage<Value> whole;
  base::HostMirror<Storage<Value>> host;
  Storage<Value> view;
  int left;

  Part(int rows, int columns, int left, int right)
      : whole("part", rows, left + columns + right),
        host(Kokkos::create_mirror_view(whole)),
        view(Kokkos::subview(whole, Kokkos::ALL, std::make_pair(left, left + columns))),
        left(left) {}

  // (Not by host's operator: where Kokkos checks bounds, most of the time would go there.)
  Value& at(int i, int j) const { return row(i)[j]; }
  Value* row(int i) const { return host.data() + i * host.extent(1) + left; }
  int rows() const { return static_cast<int>(view.extent(0)); }
  int columns() const { return static_cast<int>(view.extent(1)); }
  void fill(std::mt19937& random) const {
    for (std::size_t i = 0; i < host.extent(0); ++i) {
      Value* const row = host.data() + i * host.extent(1);
      for (std::size_t j = 0; j < host.extent(1); ++j) row[j] = Value(uniform(random));
    }
    Kokkos::deep_copy(whole, host);
  }
  void download() const { Kokkos::deep_copy(host, whole); }
};

/// The elements, row by row.
template <class Value>
std::vector<double> widened(const Part<Value>& part) {
  std::vector<double> result;
  result.reserve(std::size_t(part.rows()) * part.columns());
  for (int i = 0; i < part.rows(); ++i) {
    const Value* const row = part.row(i);
    for (int j = 0, n = part.columns(); j < n; ++j) result.push_back(row[j]);
  }
  return result;
}

/// The same with rows as columns.
std::vector<double> transposed_of(const Part<float>& part) {
  std::vector<double> result;
  result.reserve(std::size_t(part.rows()) * part.columns());
  for (int j = 0; j < part.columns(); ++j) {
    for (int i = 0, m = part.rows(); i < m; ++i) result.push_back(part.at(i, j));
  }
  return result;
}

/// Of raw numbers: without optimization, vectors would cost more than the sum.
double dot(const double* a, const double* b, int count) {
  double sum = 0;
  for (int l = 0; l < count; ++l) sum += a[l] * b[l];
  return sum;
}

/// Rounding of a sum of `count` products of numbers up to 1.
double tolerance(int count) { return 1e-7 * (2 + count); }

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

/// Marks everything, so that what a product must overwrite and what it must leave alone both show.
void mark(const Part<float>& y) {
  Kokkos::deep_copy(y.host, -777.0f);
  for (int i = 0; i < y.rows(); ++i) {
    for (int j = 0; j < y.columns(); ++j) y.at(i, j) = nan_value;
  }
  Kokkos::deep_copy(y.whole, y.host);
}

void expect_margins_untouched(const Part<float>& y) {
  for (int i = 0; i < y.rows(); ++i) {
    for (int j = 0; j < static_cast<int>(y.host.extent(1)); ++j) {
      if (j < y.left || j >= y.left + y.columns()) {
        ASSERT_EQ(y.host(i, j), -777.0f) << i << ", " << j;
      }
    }
  }
}

/// What a product with weights of type Value makes of an input, which is below 1.
template <class Value>
float entering(float x) {
  if (std::is_same_v<Value, half> && (base::machine().on_device())) {
    return static_cast<float>(half(x * 0x1p14f)) * 0x1p-14f;
  }
  return std::is_same_v<Value, bfloat16> ? static_cast<float>(bfloat16(x)) : x;
}

template <class Value>
class Linear : public ::testing::Test {
 protected:
  void check(int m, int n, int k, bool biased, int margin) {
    SCOPED_TRACE("m " + std::to_string(m) + " n " + std::to_string(n) + " k " + std::to_string(k) +
                 (biased ? " with bias" : " without bias"));
    std::mt19937 random(800 + m + n + k);
    const Part<float> x(m, k, margin, 2 * margin);
    const Part<Value> weights(n, k, 0, 0);
    const Part<float> y(m, n, margin, margin);
    x.fill(random);
    weights.fill(random);
    Kokkos::View<float*, MemorySpace> bias("bias", biased ? n : 0);
    const auto host_bias = Kokkos::create_mirror_view(bias);
    for (int j = 0; biased && j < n; ++j) host_bias(j) = uniform(random);
    Kokkos::deep_copy(bias, host_bias);
    run(x, linalg::LinearWeights(weights.view), weights, bias, y);
    if (!linalg::packs_weights()) return;
    SCOPED_TRACE("packed");
    linalg::PackedAllocator allocator;
    const auto packed = linalg::packed_weights(allocator, kvzap::DTypeOf<Value>::value, n, k);
    Kokkos::deep_copy(packed.memory(), 0xff);  // NaN  // padding must be overwritten too
    constexpr int block = linalg::LinearWeights::block_outputs;
    for (int begin = 0; begin < n; begin += block) {
      std::vector<Value> rows;
      const int end = std::min(n, begin + block);
      for (int j = begin; j < end; ++j) {
        for (int l = 0; l < k; ++l) rows.push_back(weights.at(j, l));
      }
      linalg::pack_rows(rows.data(), begin, end - begin, packed);
    }
    std::vector<float> row(k);
    for (int j = 0; j < n; j += std::max(1, n / 2)) {
      linalg::unpack_row(packed, j, row.data());
      for (int l = 0; l < k; ++l) ASSERT_EQ(row[l], static_cast<float>(weights.at(j, l)));
    }
    run(x, packed, weights, bias, y);
  }

  void run(const Part<float>& x, const linalg::LinearWeights& operand, const Part<Value>& weights,
           const Kokkos::View<float*, MemorySpace>& bias, const Part<float>& y) {
    const int m = x.rows(), n = weights.rows(), k = weights.columns();
    const bool biased = bias.extent(0) > 0;
    const auto host_bias = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, bias);
    mark(y);
    const ExecutionSpace exec;
    m_linear(exec, linalg::ConstMatrix(x.view), operand, linalg::ConstVector(bias), y.view);
    exec.fence();
    y.download();
    double largest = 0;
    const std::vector<double> wide = widened(weights);
    std::vector<double> input(k);
    for (int i = 0; i < m; ++i) {
      for (int l = 0; l < k; ++l) input[l] = entering<Value>(x.at(i, l));
      for (int j = 0; j < n; ++j) {
        const double expected =
            (biased ? host_bias(j) : 0) + dot(input.data(), wide.data() + std::size_t(j) * k, k);
        const double error = std::fabs(y.at(i, j) - expected);
        ASSERT_FALSE(std::isnan(error)) << i << ", " << j;
        largest = std::max(largest, error);
      }
    }
    EXPECT_LT(largest, tolerance(k));
    expect_margins_untouched(y);
  }

  /// Row 1 of x has a NaN in its last input; output 2 of the weights infinity, output n - 1 NaN.
  void check_special_values(int m, int n, int k) {
    SCOPED_TRACE("m " + std::to_string(m));
    std::mt19937 random(m);
    const Part<float> x(m, k, 0, 0);
    const Part<Value> weights(n, k, 0, 0);
    const Part<float> y(m, n, 0, 0);
    x.fill(random);
    weights.fill(random);
    x.at(1, k - 1) = nan_value;
    weights.at(2, k / 2) = Value(std::numeric_limits<float>::infinity());
    weights.at(n - 1, 0) = Value(nan_value);
    Kokkos::deep_copy(x.whole, x.host);
    Kokkos::deep_copy(weights.whole, weights.host);
    const auto expect_special = [&](const linalg::LinearWeights& operand) {
      mark(y);
      const ExecutionSpace exec;
      m_linear(exec, linalg::ConstMatrix(x.view), operand, linalg::ConstVector(), y.view);
      exec.fence();
      y.download();
      for (int i = 0; i < m; ++i) {
        for (int j = 0; j < n; ++j) {
          const float value = y.at(i, j);
          if (i == 1 || j == n - 1) {
            ASSERT_TRUE(std::isnan(value)) << i << ", " << j;
          } else if (j == 2) {
            ASSERT_EQ(value, std::copysign(std::numeric_limits<float>::infinity(), x.at(i, k / 2)));
          } else {
            ASSERT_TRUE(std::isfinite(value)) << i << ", " << j;
          }
        }
      }
    };
    expect_special(linalg::LinearWeights(weights.view));
    if (!linalg::packs_weights()) return;
    SCOPED_TRACE("packed");
    linalg::PackedAllocator allocator;
    const auto packed = linalg::packed_weights(allocator, kvzap::DTypeOf<Value>::value, n, k);
    Kokkos::deep_copy(packed.memory(), 0xff);  // NaN
    linalg::pack_rows(weights.row(0), 0, n, packed);
    expect_special(packed);
  }

  linalg::LinearMap m_linear;  // one for all shapes: its panel must fit each
};
using ValueTypes = ::testing::Types<float, half, bfloat16>;
TYPED_TEST_SUITE(Linear, ValueTypes);

// Eight rows (16 or 64, packed) are the most that take the way without a gemm; up to sixteen
// outputs of more rows take another.
TYPED_TEST(Linear, AnyShape) {
  for (int m : {1, 2, 8, 9, 100}) {
    for (int n : {1, 5, 63, 64, 65, 130}) {
      for (int k : {1, 31, 80}) {
        for (bool biased : {false, true}) this->check(m, n, k, biased, 0);
      }
    }
  }
}

TYPED_TEST(Linear, PartsOfWiderMatrices) {
  for (int m : {1, 8, 9, 100}) {
    for (int n : {5, 130}) this->check(m, n, 33, true, 4);
  }
}

// Panels hold 2^20 bytes of widened weights, 262 rows of 1000: the last is not full.
TYPED_TEST(Linear, SeveralPanels) {
  for (int m : {1, 9, 20}) {
    for (int n : {262, 263, 600}) this->check(m, n, 1000, true, 0);
  }
}

// Every number of rows that a kernel is compiled for, and the first that goes to a library; inputs
// and outputs that fill the kernels' blocks and that do not, and long enough for several turns of
// groups of rows.
TYPED_TEST(Linear, FewRows) {
  std::vector<int> row_counts = {21, 31, 32, 64, 65};
  for (int m = 1; m <= 18; ++m) row_counts.push_back(m);
  for (const int m : row_counts) {
    this->check(m, 71, 130, m % 2 == 0, 0);
    this->check(m, 1, 67, m % 2 == 1, 1);
    this->check(m, 193, 15, false, 0);
    this->check(m, 64, 2048, false, 0);
  }
}

TYPED_TEST(Linear, FewOutputsOfManyRows) {
  for (int n = 1; n <= 17; ++n) {
    this->check(18, n, 33, n % 2 == 0, 3);
    this->check(195, n, 64, n % 2 == 1, 0);
  }
}

TYPED_TEST(Linear, EveryInstructionSet) {
  const auto widest = base::machine().simd();
  for (auto level : {base::SimdLevel::baseline, base::SimdLevel::avx2, base::SimdLevel::avx512,
                     base::SimdLevel::avx512_bf16}) {
    if (level > widest) break;
    base::machine().set_simd(level);
    SCOPED_TRACE(base::name_of(level));
    for (int m = 1; m <= 18; ++m) this->check(m, 101, 45, true, 1);
    for (int m : {1, 5, 20}) {
      for (int k : {31, 100}) this->check(m, 70, k, true, 2);
      this->check(m, 9, 47, true, 0);
    }
    // Several slices of inputs, blocks of rows and blocks of outputs, none of them full.
    for (int m : {1, 7, 33, 100}) this->check(m, 77, 1000, m % 2 == 0, 1);
    this->check(257, 140, 300, true, 3);
    this->check(150, 17, 257, false, 0);
  }
  base::machine().set_simd(widest);
}

// NaN and infinity reach the results that they belong to, and no others: neither from rows of x and
// outputs beside them, nor from padding.
TYPED_TEST(Linear, SpecialValuesStayInTheirRowAndOutput) {
  const auto widest = base::machine().simd();
  for (auto level : {base::SimdLevel::baseline, base::SimdLevel::avx2, base::SimdLevel::avx512,
                     base::SimdLevel::avx512_bf16}) {
    if (level > widest) break;
    base::machine().set_simd(level);
    SCOPED_TRACE(base::name_of(level));
    for (int m : {3, 8, 40}) this->check_special_values(m, 67, 291);
  }
  base::machine().set_simd(widest);
}

/// The form of devices until the end of the scope.
class DeviceKernels {
 public:
  DeviceKernels() : m_before(base::machine().on_device()) { base::machine().set_device(true); }
  ~DeviceKernels() { base::machine().set_device(m_before); }
  DeviceKernels(const DeviceKernels&) = delete;
  DeviceKernels& operator=(const DeviceKernels&) = delete;

 private:
  bool m_before;
};

TYPED_TEST(Linear, OperandsOfTheWeightsType) {
  const DeviceKernels on_device;
  for (int m : {1, 2, 8, 9, 100}) {
    for (int n : {1, 64, 65}) {
      for (int k : {0, 1, 31, 80}) {
        for (bool biased : {false, true}) this->check(m, n, k, biased, k % 2 ? 0 : 4);
      }
    }
  }
}

// Rows of half inputs are scaled on their way: neither large nor small ones are lost.
TEST(LinearHalf, InputsOfAnySize) {
  const DeviceKernels on_device;
  const int k = 40;
  const float sizes[] = {0, 1e-38f, 1e-20f, 1e-6f, 1, 7e4f, 1e20f, 1e33f};
  const int m = std::size(sizes);
  std::mt19937 random(950);
  const Part<float> x(m, k, 0, 0);
  const Part<half> weights(3, k, 0, 0);
  const Part<float> y(m, 3, 0, 0);
  x.fill(random);
  weights.fill(random);
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < k; ++j) x.at(i, j) *= sizes[i];
  }
  Kokkos::deep_copy(x.whole, x.host);
  linalg::LinearMap linear;
  const ExecutionSpace exec;
  linear(exec, linalg::ConstMatrix(x.view), linalg::LinearWeights(weights.view),
         linalg::ConstVector(), y.view);
  exec.fence();
  y.download();
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < 3; ++j) {
      double expected = 0, size = 0;
      for (int l = 0; l < k; ++l) {
        expected += double{x.at(i, l)} * weights.at(j, l);
        size += std::fabs(double{x.at(i, l)} * weights.at(j, l));
      }
      EXPECT_NEAR(y.at(i, j), expected, 0x1p-11 * size + 1e-44) << sizes[i];
    }
  }
}

/// What kernels before a product do. (A function of its own: nvcc takes no kernel inside a test.)
template <class Value>
void store_rounded(const ExecutionSpace& exec, const linalg::ConstMatrix& x,
                   const linalg::RowRounder<Value>& rounded) {
  using Team = Kokkos::TeamPolicy<ExecutionSpace>;
  const std::int64_t size = x.extent(1);
  Kokkos::parallel_for(
      "round", Team(exec, static_cast<int>(x.extent(0)), Kokkos::AUTO),
      KOKKOS_LAMBDA(const typename Team::member_type& team) {
        const std::int64_t i = team.league_rank();
        rounded.store(team, i, size, [&](std::int64_t d) { return x(i, d); });
      });
}

TEST(LinearWeights, RefuseRowsWithGaps) {
  const Part<half> rows(3, 8, 1, 1);
  EXPECT_THROW(linalg::LinearWeights(rows.view), kvzap::Error);
}

// Rows that the kernel before has rounded are taken as if the map had rounded them.
TYPED_TEST(Linear, RowsRoundedBefore) {
  const DeviceKernels on_device;
  std::mt19937 random(5);
  linalg::LinearMap linear;
  const ExecutionSpace exec;
  for (const int m : {7, 2, 19}) {  // the room shrinks and grows
    constexpr int n = 33, k = 50;
    const Part<float> x(m, k, 0, 0);
    const Part<TypeParam> rows(n, k, 0, 0);
    x.fill(random);
    rows.fill(random);
    const linalg::LinearWeights weights(rows.view);
    const linalg::Matrix alone("alone", m, n), prepared("prepared", m, n);
    linear(exec, x.view, weights, {}, alone);
    const auto rounded = linear.room_for_rounded(weights.dtype(), m, k);
    EXPECT_EQ(rounded.exist(), !(std::is_same_v<TypeParam, float>));
    store_rounded(exec, x.view, linalg::RowRounder<TypeParam>(rounded));
    linear(exec, x.view, rounded, weights, {}, prepared);
    exec.fence();
    const auto a = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, alone);
    const auto b = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, prepared);
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) ASSERT_EQ(a(i, j), b(i, j)) << i << ", " << j;
    }
  }
}

// Columns of a wider y, as panels of weights write them, and rows of a wider x must not end in
// oneDNN's plain loops.
TEST(OneDNN, TakesFastKernelsForPackedWeights) {
  namespace onednn = linalg::onednn;
  if (!linalg::packs_weights() || base::machine().simd() < base::SimdLevel::avx512) {
    GTEST_SKIP() << "oneDNN does not multiply packed weights here";
  }
  for (const char* limit : {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"}) {
    if (std::getenv(limit)) GTEST_SKIP() << limit << " is set";
  }
  const auto expect_fast = [](kvzap::DType dtype, std::int64_t x_stride, std::int64_t y_stride) {
    onednn::Product product{};
    product.dtype = dtype;
    product.m = 48;
    product.n = 128;
    product.k = 96;
    product.x_stride = x_stride;
    product.y_stride = y_stride;
    EXPECT_TRUE(onednn::has_fast_product(product)) << x_stride << " " << y_stride;
  };
  for (const std::int64_t x_stride : {96, 200}) {
    for (const std::int64_t y_stride : {128, 300}) {
      expect_fast(kvzap::DType::f32, x_stride, y_stride);
      if (base::machine().has(base::SimdLevel::avx512_bf16)) {
        expect_fast(kvzap::DType::bf16, x_stride, y_stride);
      }
    }
  }
}

// A server meets any number of rows.
TEST(OneDnn, KeepsAsManyPlansAsItSays) {
  namespace onednn = linalg::onednn;
  if (!onednn::is_available()) GTEST_SKIP() << "this build has no oneDNN";
  constexpr int n = 5, k = 3, stride = 7;
  constexpr int most_rows = static_cast<int>(onednn::max_plans) + 8;
  std::mt19937 random(1);
  std::vector<float> x(most_rows * k), weights(n * k), y(most_rows * stride);
  for (float& value : x) value = uniform(random);
  for (float& value : weights) value = uniform(random);
  // The plans of the first products are gone when they come again.
  for (int m = 1; m <= most_rows + 4; ++m) {
    const int rows = (m - 1) % most_rows + 1;
    const onednn::Product product{kvzap::DType::f32, rows, n,       k,        x.data(), k,
                                  weights.data(),    k,    nullptr, y.data(), stride};
    const std::int64_t look_ups = onednn::cache_use().look_ups;
    onednn::multiply(product);
    EXPECT_EQ(onednn::cache_use().look_ups, look_ups + 1);
    ASSERT_LE(onednn::cache_use().plans, onednn::max_plans) << m;
    for (int j = 0; j < n; ++j) {
      float expected = 0;
      for (int i = 0; i < k; ++i) expected += x[(rows - 1) * k + i] * weights[j * k + i];
      ASSERT_NEAR(y[(rows - 1) * stride + j], expected, 1e-5f) << rows << " rows";
    }
  }
  if (std::getenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY") == nullptr &&
      std::getenv("DNNL_PRIMITIVE_CACHE_CAPACITY") == nullptr) {
    EXPECT_LE(onednn::cache_use().most_primitives, onednn::max_plans);
  }
}

TYPED_TEST(Linear, NothingToMultiply) {
  for (int m : {1, 9, 17}) {
    this->check(m, 7, 0, true, 0);
    this->check(m, 7, 0, false, 2);
    this->check(m, 0, 7, true, 0);
  }
  this->check(0, 7, 7, true, 0);
}

/// Which of the operands is transposed.
enum class Form { nt, nn, tn };

/// `large`: by multiply_large, whose alpha is 1.
void check_multiply(int m, int n, int k, Form form, float alpha, float beta, int margin,
                    bool large = false) {
  SCOPED_TRACE("m " + std::to_string(m) + " n " + std::to_string(n) + " k " + std::to_string(k) +
               (form == Form::nt   ? " nt"
                : form == Form::nn ? " nn"
                                   : " tn"));
  std::mt19937 random(900 + m + n + k);
  const bool a_transposed = form == Form::tn;
  const bool transposed = form == Form::nt;
  const Part<float> a(a_transposed ? k : m, a_transposed ? m : k, margin, 2 * margin);
  const Part<float> b(transposed ? n : k, transposed ? k : n, 2 * margin, margin);
  const Part<float> c(m, n, margin, 3 * margin);
  a.fill(random);
  b.fill(random);
  // With beta = 0 what c held does not matter, be it NaN.
  mark(c);
  Storage<float> before("before", m, n);
  const auto host_before = Kokkos::create_mirror(Kokkos::HostSpace{}, before);
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      host_before(i, j) = beta == 0 ? 0 : uniform(random);
      if (beta != 0) c.at(i, j) = host_before(i, j);
    }
  }
  Kokkos::deep_copy(c.whole, c.host);
  const ExecutionSpace exec;
  const auto multiply = a_transposed ? linalg::multiply_tn
                        : transposed ? linalg::multiply_nt
                                     : linalg::multiply_nn;
  if (large) {
    using linalg::Op;
    linalg::multiply_large(exec, a_transposed ? Op::transposed : Op::plain,
                           linalg::ConstMatrix(a.view), transposed ? Op::transposed : Op::plain,
                           linalg::ConstMatrix(b.view), beta, c.view);
  } else {
    multiply(exec, alpha, linalg::ConstMatrix(a.view), linalg::ConstMatrix(b.view), beta, c.view);
  }
  exec.fence();
  c.download();
  double largest = 0;
  const std::vector<double> left = a_transposed ? transposed_of(a) : widened(a);  // (m, k)
  const std::vector<double> right = transposed ? widened(b) : transposed_of(b);   // (n, k)
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      const double expected = double{beta} * host_before(i, j) +
                              double{alpha} * dot(left.data() + std::size_t(i) * k,
                                                  right.data() + std::size_t(j) * k, k);
      const double error = std::fabs(c.at(i, j) - expected);
      ASSERT_FALSE(std::isnan(error)) << i << ", " << j;
      largest = std::max(largest, error);
    }
  }
  EXPECT_LT(largest, tolerance(k) * std::max(1.0f, std::fabs(alpha)));
  expect_margins_untouched(c);
}

TEST(Multiply, PartsOfWiderMatrices) {
  for (Form form : {Form::nt, Form::nn, Form::tn}) {
    for (int margin : {0, 3}) {
      for (int m : {1, 9, 64}) {
        for (int n : {1, 16, 77}) {
          for (int k : {1, 80, 129}) {
            check_multiply(m, n, k, form, 1, 0, margin);
            check_multiply(m, n, k, form, 1, 1, margin);
            check_multiply(m, n, k, form, 1, 0, margin, true);
            check_multiply(m, n, k, form, 1, 1, margin, true);
            check_multiply(m, n, k, form, -1.5f, 0.5f, margin);
          }
        }
      }
    }
  }
}

// Hosts with AVX-512 leave these to oneDNN.
TEST(Multiply, AMillionTerms) {
  for (Form form : {Form::nt, Form::nn, Form::tn}) {
    for (int margin : {0, 3}) {
      check_multiply(64, 144, 129, form, 1, 0, margin);
      check_multiply(64, 144, 129, form, -1.5f, 0.5f, margin);
    }
  }
}

TEST(Multiply, EmptyResult) {
  for (Form form : {Form::nt, Form::nn, Form::tn}) {
    check_multiply(0, 5, 4, form, 1, 0, 0);
    check_multiply(5, 0, 4, form, 1, 0, 0);
  }
}

}  // namespace
