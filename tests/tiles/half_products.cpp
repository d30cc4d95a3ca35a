// Products of f16 where oneDNN has kernels of tiles for them: a stand-in for oneDNN takes them
// here, so that what LinearMap does before and after runs on any processor with AVX512-BF16 (at the
// level of AMX-FP16, see trap.cpp).
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "base/machine.hpp"
#include "base/simd.hpp"
#include "linalg/gemm.hpp"
#include "linalg/host/onednn.hpp"

namespace kvzap::linalg::onednn {
namespace {
int half_products = 0;
}  // namespace

bool is_available() { return true; }
const char* version() { return "stand-in"; }
CacheUse cache_use() { return {0, 0, 0}; }
void multiply(const Gemm&) { throw Error("the stand-in has none"); }

void multiply(const Product& p) {
  ASSERT_EQ(p.dtype, kvzap::DType::f16);
  ++half_products;
  const auto* const x = static_cast<const half*>(p.x);
  const auto* const weights = static_cast<const half*>(p.weights);
  // Blocks of 64 outputs, in them pairs of inputs.
  const std::int64_t padded = LinearWeights::padded_inputs(kvzap::DType::bf16, p.k);
  std::vector<float> row(p.k);
  for (std::int64_t n = 0; n < p.n; ++n) {
    for (std::int64_t k = 0; k < p.k; ++k) {
      row[k] = p.weights_stride > 0
                   ? weights[n * p.weights_stride + k]
                   : weights[n / 64 * 64 * padded + k / 2 * 128 + n % 64 * 2 + k % 2];
    }
    for (std::int64_t m = 0; m < p.m; ++m) {
      float sum = p.bias ? p.bias[n] : 0;
      for (std::int64_t k = 0; k < p.k; ++k) sum += x[m * p.x_stride + k] * row[k];
      p.y[m * p.y_stride + n] = sum;
    }
  }
}
bool has_fast_product(const Product& p) { return p.dtype == kvzap::DType::f16; }
bool has_fast_products(DType dtype, bool /*packed*/) { return dtype == DType::f16; }

}  // namespace kvzap::linalg::onednn

namespace {

using kvzap::half;
using kvzap::MemorySpace;
using kvzap::linalg::LinearWeights;
namespace base = kvzap::base;
namespace linalg = kvzap::linalg;

float uniform(std::mt19937& random) { return static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f; }

class HalfProducts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (base::machine().simd() < base::SimdLevel::amx_fp16 || base::machine().on_device()) {
      GTEST_SKIP() << "products of f16 take no tiles here";
    }
  }

  /// Rows of x of very different sizes, in a wider matrix as y is.
  void check(int m, int n, int k, bool biased, bool special = false) {
    SCOPED_TRACE("m " + std::to_string(m) + " n " + std::to_string(n) + " k " + std::to_string(k));
    std::mt19937 random(m + n + k);
    const linalg::Matrix x("x", m, k + 5), y("y", m, n + 3);
    const Kokkos::View<half**, Kokkos::LayoutRight, MemorySpace> rows("rows", n, k);
    const linalg::Vector bias("bias", biased ? n : 0);
    const float sizes[] = {1, 1e-38f, 1e-20f, 0, 1e-6f, 7e4f, 1e20f, 1e33f};
    for (int i = 0; i < m; ++i) {
      for (int l = 0; l < k + 5; ++l) x(i, l) = uniform(random) * sizes[i % 8];
    }
    for (int j = 0; j < n; ++j) {
      for (int l = 0; l < k; ++l) rows(j, l) = half(uniform(random));
      if (biased) bias(j) = uniform(random);
    }
    constexpr float infinity = std::numeric_limits<float>::infinity();
    if (special) {
      x(1, 0) = infinity;  // beside values that would overflow with it
      x(5, 1) = -infinity;
      x(2, 0) = std::numeric_limits<float>::quiet_NaN();
      rows(3, 1) = half(infinity);
    }
    linalg::PackedAllocator allocator;
    const auto packed = linalg::packed_weights(allocator, kvzap::DType::f16, n, k);
    Kokkos::deep_copy(packed.memory(), 0xff);  // NaN
    linalg::pack_rows(rows.data(), 0, n, packed);
    const auto part = [](const auto& matrix, int columns) {
      return Kokkos::subview(matrix, Kokkos::ALL, std::make_pair(0, columns));
    };
    for (const auto& weights : {LinearWeights(rows), packed}) {
      SCOPED_TRACE(weights.is_packed() ? "packed" : "plain");
      Kokkos::deep_copy(y, -7.0f);
      const int before = linalg::onednn::half_products;
      m_linear(kvzap::ExecutionSpace(), part(x, k), weights, bias, part(y, n));
      EXPECT_GT(linalg::onednn::half_products, before);
      for (int i = 0; i < m; ++i) {
        for (int j = 0; j < n; ++j) {
          double expected = biased ? bias(j) : 0, size = std::fabs(expected);
          for (int l = 0; l < k; ++l) {
            const double term = double{x(i, l)} * rows(j, l);
            expected += term;
            size += std::fabs(term);
          }
          if (!std::isfinite(expected)) {
            EXPECT_EQ(std::isnan(y(i, j)), std::isnan(expected)) << i << ", " << j;
            if (std::isinf(expected)) {
              EXPECT_EQ(y(i, j), expected) << i << ", " << j;
            }
          } else {
            EXPECT_NEAR(y(i, j), expected, 0x1p-11 * size + 1e-44) << i << ", " << j;
          }
        }
        for (int j = n; j < n + 3; ++j) EXPECT_EQ(y(i, j), -7.0f);
      }
      if (HasFailure()) return;
    }
  }

  linalg::LinearMap m_linear;
};

TEST_F(HalfProducts, AnyShape) {
  for (const int k : {1, 15, 32, 47, 300}) {
    for (const int n : {17, 64, 101}) check(20, n, k, n % 2 == 0);
  }
  check(64, 130, 129, true);
}

TEST_F(HalfProducts, SeveralPanels) { check(17, 2200, 2050, true); }

TEST_F(HalfProducts, SpecialValuesStayInTheirRowAndOutput) { check(24, 70, 40, false, true); }

}  // namespace
