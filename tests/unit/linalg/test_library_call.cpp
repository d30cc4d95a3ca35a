// Products with a bias or an activation as cuBLASLt would compute them: a host reads the matrices
// by columns, as the calls say.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <kvzap/core/array_view.hpp>
#include <random>
#include <string>
#include <vector>

#include "base/kokkos_compat.hpp"
#include "base/machine.hpp"
#include "linalg/device/library_call.hpp"
#include "linalg/gemm.hpp"

namespace {

using namespace kvzap;
using linalg::Epilogue;
using linalg::LibraryCall;
using linalg::Product;
using linalg::StoredMatrix;

float uniform(std::mt19937& random) { return static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f; }

/// A buffer of the host's with values of any type.
class Numbers {
 public:
  Numbers(DType dtype, std::int64_t count, std::mt19937& random)
      : m_dtype(dtype), m_bytes(count * static_cast<std::int64_t>(size_of(dtype))) {
    with_value_type(dtype, [&](auto zero) {
      using Value = decltype(zero);
      auto* const values = reinterpret_cast<Value*>(m_bytes.data());
      for (std::int64_t i = 0; i < count; ++i) values[i] = Value(uniform(random));
    });
  }
  void* data() { return m_bytes.data(); }
  double operator[](std::int64_t i) const { return at(m_dtype, m_bytes.data(), i); }
  static double at(DType dtype, const void* data, std::int64_t i) {
    double value = 0;
    with_value_type(dtype, [&](auto zero) {
      value = static_cast<float>(static_cast<const decltype(zero)*>(data)[i]);
    });
    return value;
  }

 private:
  DType m_dtype;
  std::vector<std::uint8_t> m_bytes;
};

/// Element (row, column) of a matrix, which must lie within it.
double element(const StoredMatrix& matrix, const void* data, std::int64_t row,
               std::int64_t column) {
  EXPECT_TRUE(row < matrix.rows && column < matrix.columns && matrix.rows <= matrix.stride);
  return Numbers::at(matrix.dtype, data, column * matrix.stride + row);
}

double epilogue_of(Epilogue epilogue, double x) {
  if (epilogue == Epilogue::none) return x;
  if (epilogue == Epilogue::relu) return std::max(x, 0.0);
  return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

/// Element (row, column) of the call's result.
double result_of(const LibraryCall& call, std::int64_t row, std::int64_t column) {
  const std::int64_t depth = call.a_transposed ? call.a.rows : call.a.columns;
  EXPECT_EQ(depth, call.b_transposed ? call.b.columns : call.b.rows);
  EXPECT_EQ(call.d.rows, call.a_transposed ? call.a.columns : call.a.rows);
  EXPECT_EQ(call.d.columns, call.b_transposed ? call.b.rows : call.b.columns);
  double sum = 0;
  for (std::int64_t k = 0; k < depth; ++k) {
    const double a = call.a_transposed ? element(call.a, call.a_data, k, row)
                                       : element(call.a, call.a_data, row, k);
    const double b = call.b_transposed ? element(call.b, call.b_data, column, k)
                                       : element(call.b, call.b_data, k, column);
    sum += a * b;
  }
  sum *= call.alpha;
  if (call.beta != 0) sum += call.beta * element(call.d, call.d_data, row, column);
  if (call.bias != nullptr) sum += Numbers::at(call.d.dtype, call.bias, row);
  return epilogue_of(call.epilogue, sum);
}

struct Case {
  DType dtype, c_dtype;
  Epilogue epilogue;
  bool a_transposed, transposed, biased;
};

void check(const Case& own, std::int64_t m, std::int64_t n, std::int64_t k, std::mt19937& random) {
  Product p;
  p.dtype = own.dtype;
  p.c_dtype = own.c_dtype;
  p.m = m;
  p.n = n;
  p.k = k;
  p.a_transposed = own.a_transposed;
  p.transposed = own.transposed;
  p.epilogue = own.epilogue;
  p.alpha = own.biased ? 1.0f : 0.5f;
  p.a_stride = (own.a_transposed ? m : k) + 2;
  p.b_stride = (own.transposed ? k : n) + 1;
  p.c_stride = n + 3;
  Numbers a(own.dtype, p.a_stride * std::max(m, k), random);
  Numbers b(own.dtype, p.b_stride * std::max(n, k), random);
  Numbers c(own.c_dtype, p.c_stride * m, random), bias(own.c_dtype, n, random);
  p.a = a.data();
  p.b = b.data();
  p.c = c.data();
  p.bias = own.biased ? bias.data() : nullptr;
  const LibraryCall call = linalg::library_call(p);
  std::vector<double> expected;
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) expected.push_back(result_of(call, j, i));
  }
  const Numbers before = c;
  const ExecutionSpace exec;
  linalg::multiply(exec, p);
  exec.fence();
  const double rounding = own.c_dtype == DType::bf16 ? 0x1p-8 : 1e-6;
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < p.c_stride; ++j) {
      const double found = c[i * p.c_stride + j];
      if (j >= n) {
        ASSERT_EQ(found, before[i * p.c_stride + j]);
        continue;
      }
      const double own_expected = expected[i * n + j];
      ASSERT_NEAR(found, own_expected, rounding * std::fabs(own_expected) + 1e-5) << i << ' ' << j;
    }
  }
}

TEST(LibraryCall, SaysWhatTheProductIs) {
  if (!base::runs_on_host) GTEST_SKIP() << "reads the memory of a host";
  std::mt19937 random(3);
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const DType c_dtype : {DType::f32, DType::bf16}) {
      if (c_dtype != DType::f32 && c_dtype != dtype) continue;
      for (const Epilogue epilogue : {Epilogue::none, Epilogue::relu, Epilogue::gelu_tanh}) {
        for (const int bits : {0, 1, 2, 3, 4, 5, 6, 7}) {
          const Case own{dtype, c_dtype, epilogue, (bits & 1) != 0, (bits & 2) != 0, bits >= 4};
          check(own, 5, 19, 33, random);
          check(own, 1, 16, 8, random);
          check(own, 18, 1, 1, random);
        }
      }
    }
  }
}

TEST(LibraryCall, TakesNoBatch) {
  Product p;
  p.batch = 2;
  EXPECT_THROW(linalg::library_call(p), Error);
}

/// That of a linear map of `rows` rows of x.
LibraryCall map_of(std::int64_t rows, bool a_transposed = false) {
  alignas(16) static float memory[8];
  Product p;
  p.m = rows;
  p.n = 48;
  p.k = 32;
  p.a = p.b = p.c = memory;
  p.a_transposed = a_transposed;
  p.transposed = true;
  p.a_stride = a_transposed ? rows : 32;
  p.b_stride = 32;
  p.c_stride = 48;
  return linalg::library_call(p);
}

// An algorithm serves all calls of its key, so that a server's steps of any size need few of them.
TEST(LibraryCall, FewChoicesServeAllNumbersOfRows) {
  std::vector<linalg::LibraryKey> keys;
  for (std::int64_t rows = 1; rows <= 8192; ++rows) {
    const LibraryCall call = map_of(rows), choice = linalg::choice_of(call);
    ASSERT_GE(choice.d.columns, rows);
    ASSERT_LE(choice.d.columns, rows + rows / 8);
    ASSERT_EQ(choice.b.columns, choice.d.columns);
    ASSERT_EQ(choice.b.rows, call.b.rows);
    ASSERT_EQ(choice.d.rows, call.d.rows);
    const linalg::LibraryKey key = linalg::key_of(call);
    ASSERT_EQ(key, linalg::key_of(choice));
    if (keys.empty() || keys.back() != key) keys.push_back(key);
    // Rows of such a matrix lie side by side: more would not fit its stride.
    ASSERT_EQ(linalg::choice_of(map_of(rows, true)).b.rows, rows);
  }
  EXPECT_EQ(keys.size(), 16u + 8 * 9);
}

TEST(LibraryCall, KeysTellWhatAlgorithmsDependOn) {
  const LibraryCall call = map_of(4);
  const auto differs = [&](const auto& change) {
    LibraryCall other = call;
    change(other);
    return linalg::key_of(other) != linalg::key_of(call);
  };
  EXPECT_TRUE(differs([](LibraryCall& c) { c.a.dtype = DType::bf16; }));
  EXPECT_TRUE(differs([](LibraryCall& c) { c.d.dtype = DType::bf16; }));
  EXPECT_TRUE(differs([](LibraryCall& c) { c.a_transposed = false; }));
  EXPECT_TRUE(differs([](LibraryCall& c) { c.b_transposed = true; }));
  EXPECT_TRUE(differs([](LibraryCall& c) { c.d.rows = 47; }));
  EXPECT_TRUE(differs([](LibraryCall& c) { c.a.rows = 31; }));
  EXPECT_TRUE(differs([](LibraryCall& c) { c.a.stride = 33; }));
  EXPECT_TRUE(differs([](LibraryCall& c) { c.b.stride = 33; }));
  EXPECT_TRUE(differs([](LibraryCall& c) { c.d.stride = 49; }));
  EXPECT_TRUE(differs([](LibraryCall& c) { c.beta = 1; }));
  EXPECT_TRUE(differs([](LibraryCall& c) { c.epilogue = Epilogue::relu; }));
  EXPECT_TRUE(differs([](LibraryCall& c) { c.bias = c.a_data; }));
  const auto moved = [](auto* data) {
    return reinterpret_cast<char*>(const_cast<void*>(static_cast<const void*>(data))) + 4;
  };
  EXPECT_TRUE(differs([&](LibraryCall& c) { c.a_data = moved(c.a_data); }));
  EXPECT_TRUE(differs([&](LibraryCall& c) { c.b_data = moved(c.b_data); }));
  EXPECT_TRUE(differs([&](LibraryCall& c) { c.d_data = moved(c.d_data); }));
  EXPECT_FALSE(differs([](LibraryCall& c) { c.alpha = 2; }));
}

int n_launches = 0, n_finishes = 0;

/// Bias and activation belong to the product's launch where the weights' type allows it.
class FusedMap : public ::testing::Test {
 protected:
  FusedMap() : m_before(base::machine().on_device()) { base::machine().set_device(true); }
  ~FusedMap() override { base::machine().set_device(m_before); }
  FusedMap(const FusedMap&) = delete;
  FusedMap& operator=(const FusedMap&) = delete;

  template <class Value>
  static linalg::WeightRows<Value> some_rows(std::int64_t n, std::int64_t k, std::mt19937& random) {
    const linalg::WeightRows<Value> rows("rows", n, k);
    const auto host = Kokkos::create_mirror_view(rows);
    for (std::int64_t i = 0; i < n; ++i) {
      for (std::int64_t j = 0; j < k; ++j) host(i, j) = Value(uniform(random));
    }
    Kokkos::deep_copy(rows, host);
    return rows;
  }

  template <class Work>
  static void count_launches(const Work& work) {
    namespace tools = Kokkos::Tools::Experimental;
    n_launches = n_finishes = 0;
    tools::set_begin_parallel_for_callback(
        [](const char* label, const std::uint32_t, std::uint64_t*) {
          ++n_launches;
          if (std::string(label) == "kvzap::linear::finish") ++n_finishes;
        });
    work();
    tools::set_begin_parallel_for_callback(nullptr);
  }

  linalg::LinearMap map;
  std::mt19937 random{4};

 private:
  bool m_before;
};

TEST_F(FusedMap, ABiasTakesNoLaunchOfItsOwn) {
  const ExecutionSpace exec;
  const auto x = some_rows<float>(3, 40, random);
  const linalg::Vector bias("bias", 24);
  const linalg::Matrix y("y", 3, 24);
  const auto finishes = [&](auto zero) {
    const linalg::LinearWeights weights(some_rows<decltype(zero)>(24, 40, random));
    count_launches([&] { map(exec, x, weights, bias, y); });
    return n_finishes;
  };
  EXPECT_EQ(finishes(float{}), 0);
  EXPECT_EQ(finishes(bfloat16{}), 0);
  EXPECT_EQ(finishes(kvzap::half{}), 1);  // which also undoes the scaling of rows
}

TEST_F(FusedMap, ActivatesInTheProduct) {
  const ExecutionSpace exec;
  constexpr std::int64_t m = 5, n = 24, k = 40;
  const auto x = some_rows<float>(m, k, random);
  const auto bias = some_rows<bfloat16>(1, n, random);
  const linalg::LinearWeights weights(some_rows<bfloat16>(n, k, random));
  const linalg::Vector wide_bias("bias", n);
  const auto host_bias = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), bias);
  const auto host_wide = Kokkos::create_mirror_view(wide_bias);
  for (std::int64_t j = 0; j < n; ++j) host_wide(j) = static_cast<float>(host_bias(0, j));
  Kokkos::deep_copy(wide_bias, host_wide);
  const linalg::Matrix y("y", m, n);
  const linalg::WeightRows<bfloat16> values("values", m, n);
  for (const bool biased : {false, true}) {
    map(exec, x, weights, biased ? linalg::ConstVector(wide_bias) : linalg::ConstVector(), y);
    exec.fence();
    const auto sums = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), y);
    for (const Epilogue epilogue : {Epilogue::relu, Epilogue::gelu_tanh}) {
      linalg::Activated result;
      result.epilogue = epilogue;
      result.values = values.data();
      if (biased) result.bias = Kokkos::View<const bfloat16*, MemorySpace>(bias.data(), n);
      linalg::RoundedRows rows;
      count_launches([&] { rows = map.activated(exec, x, {}, weights, result); });
      exec.fence();
      ASSERT_EQ(rows.values, values.data());
      EXPECT_EQ(rows.dtype, DType::bf16);
      if (base::runs_on_host) {
        EXPECT_EQ(n_launches, 2);  // rounding and product
      }
      const auto found = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), values);
      for (std::int64_t i = 0; i < m; ++i) {
        for (std::int64_t j = 0; j < n; ++j) {
          const double expected = epilogue_of(epilogue, sums(i, j));
          ASSERT_NEAR(static_cast<float>(found(i, j)), expected,
                      0x1p-8 * std::fabs(expected) + 1e-3);
        }
      }
    }
  }
}

TEST_F(FusedMap, LeavesOtherTypesAlone) {
  const ExecutionSpace exec;
  const auto x = some_rows<float>(2, 40, random);
  const linalg::WeightRows<bfloat16> values("values", 2, 24);
  linalg::Activated result;
  result.epilogue = Epilogue::relu;
  result.values = values.data();
  const auto exists = [&](auto zero) {
    const linalg::LinearWeights weights(some_rows<decltype(zero)>(24, 40, random));
    return map.activated(exec, x, {}, weights, result).exist();
  };
  EXPECT_TRUE(exists(bfloat16{}));
  EXPECT_FALSE(exists(float{}));
  EXPECT_FALSE(exists(kvzap::half{}));
  base::machine().set_device(false);
  EXPECT_EQ(exists(bfloat16{}), !base::runs_on_host);
}

}  // namespace
