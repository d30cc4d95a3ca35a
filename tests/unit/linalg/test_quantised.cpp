// Quantised weights in panels: their values bit for bit, and products against double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/byte_products.hpp"
#include "base/cuda/has_tensor_cores.hpp"
#include "base/machine.hpp"
#include "linalg/cuda/quantised_products.hpp"
#include "linalg/gemm.hpp"
#include "linalg/quantised/kernels.hpp"
#include "linalg/quantised/products.hpp"
#include "unit/linalg/stored_rows.hpp"

namespace {

using namespace kvzap;
namespace quantised = linalg::quantised;
using quantised::RowsAs;
using namespace stored;  // NOLINT(google-build-using-namespace): all of its words

struct Levels {
  const base::SimdLevel before = base::machine().simd();
  ~Levels() { base::machine().set_simd(before); }
  template <class Work>
  static void for_each(const Work& work) {
    for (const auto level : {base::SimdLevel::baseline, base::SimdLevel::avx2,
                             base::SimdLevel::avx512, base::SimdLevel::avx512_bf16}) {
      if (!base::processor_has(level)) continue;
      SCOPED_TRACE(base::name_of(level));
      base::machine().set_simd(level);
      work();
    }
  }
};

class QuantisedFormat : public ::testing::TestWithParam<const char*> {};

TEST_P(QuantisedFormat, ValuesAreThoseOfTheBlocks) {
  if (!base::runs_on_host) GTEST_SKIP() << "reads panels on the host";
  std::mt19937 random(1);
  const StoredRows rows(GetParam(), 37, 512, random);
  for (const Ranges& columns : {Ranges{{0, 512}}, Ranges{{40, 72}, {72, 200}, {300, 512}}}) {
    const Weights weights({rows}, columns);
    const std::int64_t inputs = weights.matrix->inputs();
    for (std::int64_t n = 0; n < 37; ++n) {
      std::vector<float> values(inputs);
      weights.matrix->decode(n, 0, inputs, values.data());
      ASSERT_EQ(std::memcmp(values.data(), weights.values[n].data(), inputs * sizeof(float)), 0)
          << "output " << n;
    }
  }
}

TEST_P(QuantisedFormat, UnpackedPanelsHaveTheSameValues) {
  if (!base::runs_on_host) GTEST_SKIP() << "reads panels on the host";
  const Levels levels;
  std::mt19937 random(2);
  const StoredRows rows(GetParam(), 19, 2560, random);  // more groups than a chunk
  const Weights weights({rows}, {{0, 2560}});
  const quantised::Panels& panels = weights.matrix->sections()[0].panels;
  Levels::for_each([&] {
    for (std::int64_t panel = 0; panel < 2; ++panel) {
      std::vector<float> floats(2560 * 64);
      std::vector<bfloat16> pairs(2560 * 64);
      quantised::unpack(panels, panel, floats.data());
      quantised::unpack(panels, panel, pairs.data());
      for (std::int64_t k = 0; k < 2560; ++k) {
        for (std::int64_t o = 0; o < std::min<std::int64_t>(16, 19 - panel * 16); ++o) {
          const float value = weights.values[panel * 16 + o][k];
          ASSERT_EQ(floats[k * 64 + o], value) << panel << ' ' << k << ' ' << o;
          // (Zeros may differ in sign.)
          ASSERT_EQ(static_cast<float>(pairs[k / 2 * 128 + 2 * o + k % 2]),
                    static_cast<float>(bfloat16(value)));
        }
      }
    }
  });
}

/// Rows of bytes: the nearest integers, their sums, and NaN for a group that has one.
TEST(ByteRows, AreNearest) {
  if (!base::runs_on_host) GTEST_SKIP() << "host kernels";
  const Levels levels;
  std::mt19937 random(9);
  constexpr int inputs = 224, groups = inputs / 32;
  const linalg::Matrix x = random_rows(1, inputs, random);
  for (int k = 0; k < 32; ++k) x(0, k) = 0;
  x(0, 70) = std::nanf("");
  for (int k = 96; k < 128; ++k) x(0, k) *= 1e-39f;
  x(0, 140) = -1000;
  Levels::for_each([&] {
    std::vector<std::uint8_t> buffer(quantised::ByteRows::row_bytes(inputs, RowsAs::bytes));
    const auto row = quantised::ByteRows::at(buffer.data(), 1, inputs, RowsAs::bytes);
    quantised::round_to_bytes(&x(0, 0), row);
    for (int g = 0; g < groups; ++g) {
      const float* const values = &x(0, 32 * g);
      float largest = 0;
      for (int i = 0; i < 32; ++i) largest = std::max(largest, std::fabs(values[i]));
      int sums[2] = {0, 0};
      for (int i = 0; i < 32; ++i) {
        const int byte = row.values[32 * g + i];
        sums[i / 16] += byte;
        const bool counts_as_zero = g == 2 || largest < 1e-36f;
        ASSERT_NEAR(byte, counts_as_zero ? 0 : values[i] / largest * 127, 0.5001) << g << ' ' << i;
      }
      if (g == 2) {
        ASSERT_TRUE(std::isnan(row.scales[g]) && std::isnan(row.totals[g]));
        continue;
      }
      ASSERT_FLOAT_EQ(row.scales[g], largest / 127);
      ASSERT_EQ(row.totals[g], row.scales[g] * static_cast<float>(sums[0] + sums[1]));
      ASSERT_EQ(row.starts[g], -(sums[0] + sums[1]));
      ASSERT_EQ(row.half_starts[2 * g], -sums[0]);
      ASSERT_EQ(row.half_starts[2 * g + 1], -sums[1]);
    }
  });
}

/// Groups that stand out in their row keep 16 bits, the others 8; lists name the rows that have
/// them.
TEST(ByteRows, KeepRests) {
  if (!base::runs_on_host) GTEST_SKIP() << "host kernels";
  const Levels levels;
  std::mt19937 random(10);
  constexpr int rows = 5, inputs = 640, groups = inputs / 32;
  const linalg::Matrix x("x", rows, inputs);
  const auto stands_out = [](int m, int g) { return m > 0 && (g == m || (m == 3 && g == 7)); };
  for (int m = 0; m < rows; ++m) {
    for (int k = 0; k < inputs; ++k)
      x(m, k) = uniform(random) * (stands_out(m, k / 32) ? 40.0f : 1.0f);
  }
  x(4, 300) = std::nanf("");  // no group of its row stands out of NaN
  Levels::for_each([&] {
    std::vector<std::uint8_t> buffer(
        rows * quantised::ByteRows::row_bytes(inputs, RowsAs::bytes_and_rests));
    const auto block =
        quantised::ByteRows::at(buffer.data(), rows, inputs, RowsAs::bytes_and_rests);
    for (int m = 0; m < rows; ++m) quantised::round_to_bytes(&x(m, 0), block.row(m));
    quantised::list_rests(block);
    for (int g = 0; g < groups; ++g) {
      std::vector<int> expected;
      for (int m = 0; m < rows - 1; ++m) {
        const int at = g * rows + m, rest = (groups + g) * rows + m;
        if (stands_out(m, g)) expected.push_back(m);
        for (int i = 0; i < 32; ++i) {
          double value = double{block.scales[at]} * block.values[at * 32 + i];
          double step = block.scales[at];
          if (stands_out(m, g)) {
            step = block.scales[rest];
            value += step * block.values[rest * 32 + i];
          }
          ASSERT_NEAR(value, x(m, 32 * g + i), 0.501 * step) << m << ' ' << g;
        }
      }
      const std::uint8_t* const list = block.rest_rows + g * rows;
      ASSERT_EQ(std::vector<int>(list, list + block.rest_counts[g]), expected) << g;
    }
  });
}

/// Each instruction set gives the products of the rounded rows but for the rounding of floats,
/// since dots are exact. A row's products depend neither on the other rows nor on the panels taken
/// at once.
TEST_P(QuantisedFormat, InstructionSetsAgree) {
  if (!base::runs_on_host) GTEST_SKIP() << "host kernels";
  std::mt19937 random(3);
  constexpr int outputs = 3 * 16 - 7, inputs = 768;  // the last panel has no other beside it
  const StoredRows rows(GetParam(), outputs, inputs, random);
  const Weights weights({rows}, {{0, inputs}});
  const quantised::Section& section = weights.matrix->sections()[0];
  using base::ByteProducts;
  for (const int n_rows : {1, 2, 3, 4, 5, 8, 15, 31, 32, 33, 64, quantised::most_rows}) {
    const linalg::Matrix x = random_rows(n_rows, inputs, random);
    for (int m = 0; m < n_rows; m += 3) x(m, m * 37 % inputs) = 50;
    const bool by_floats = weights.matrix->has_floats();
    for (const bool with_rests : {false, true}) {
      if (with_rests && by_floats) continue;
      const RowsAs as = by_floats    ? RowsAs::floats
                        : with_rests ? RowsAs::bytes_and_rests
                                     : RowsAs::bytes;
      std::vector<std::uint8_t> buffer(n_rows * quantised::ByteRows::row_bytes(inputs, as));
      auto bytes = quantised::ByteRows::at(buffer.data(), n_rows, inputs, as);
      if (by_floats) bytes.floats = x.data();
      std::vector<double> expected(n_rows * outputs), bounds(n_rows * outputs);
      for (int m = 0; m < n_rows; ++m) {
        if (!by_floats) quantised::round_to_bytes(&x(m, 0), bytes.row(m));
        for (int k = 0; k < inputs; ++k) {
          const std::int64_t at = std::int64_t{k / 32} * n_rows + m;
          double own =
              by_floats ? x(m, k) : double{bytes.scales[at]} * bytes.values[at * 32 + k % 32];
          if (with_rests) {
            const std::int64_t rest = at + bytes.groups() * n_rows;
            if (bytes.scales[rest] != 0) {
              own += double{bytes.scales[rest]} * bytes.values[rest * 32 + k % 32];
            }
          }
          for (int n = 0; n < outputs; ++n) {
            expected[m * outputs + n] += own * weights.values[n][k];
            bounds[m * outputs + n] += 2e-6 * std::fabs(own * weights.values[n][k]);
          }
        }
      }
      if (with_rests) quantised::list_rests(bytes);
      for (const auto set : {ByteProducts::portable, ByteProducts::neon_dot, ByteProducts::avx2,
                             ByteProducts::avx_vnni, ByteProducts::avx512_vnni}) {
        if (!base::processor_has(set)) continue;
        SCOPED_TRACE(std::string(base::name_of(set)) + ", " + std::to_string(n_rows) + " rows");
        const quantised::AddChunk add_chunk = quantised::add_chunk_of(set);
        if (with_rests && (!add_chunk.takes_rests || n_rows < add_chunk.least_rows)) continue;
        const int together = by_floats ? 1 : add_chunk.panels_at_once(n_rows);
        std::vector<float> found(n_rows * outputs);
        for (std::int64_t panel = 0; panel < section.n_panels(); panel += together) {
          quantised::product(add_chunk, section, panel, together, bytes, nullptr,
                             {&found[panel * 16], outputs, n_rows});
        }
        for (std::size_t i = 0; i < found.size(); ++i) {
          ASSERT_NEAR(found[i], expected[i], bounds[i]) << "element " << i;
        }
        if (with_rests) continue;  // kernels of a few rows take none
        for (int m = 0; m < n_rows; ++m) {
          float alone[outputs];
          for (std::int64_t panel = 0; panel < section.n_panels(); ++panel) {
            quantised::product(add_chunk, section, panel, 1, bytes.row(m), nullptr,
                               {alone + panel * 16, outputs, 1});
          }
          ASSERT_TRUE(std::equal(alone, alone + outputs, &found[m * outputs])) << "row " << m;
        }
      }
    }
  }
}

/// The largest codes of both operands: no sum of 16 bits overflows.
TEST_P(QuantisedFormat, LargestCodesDoNotOverflow) {
  if (!base::runs_on_host) GTEST_SKIP() << "host kernels";
  const Levels levels;
  std::mt19937 random(4);
  for (const int code : {0x00, 0xff, 0x80, 0x7f}) {
    StoredRows rows(GetParam(), 16, 256, random);
    for (std::size_t at = 0; at < rows.bytes.size(); at += rows.format.bytes) {
      const bool ends_with_scales = std::string(GetParam()) == "Q6_K";
      const std::size_t begin = ends_with_scales ? 0 : rows.format.bytes - rows.format.values / 2;
      const std::size_t end = ends_with_scales ? 192 : rows.format.bytes;
      const std::size_t first = std::string(GetParam()) == "Q8_0" ? 2 : begin;
      if (std::string(GetParam()) == "F8_E4M3" && (code & 127) == 127) continue;  // NaN
      std::fill(&rows.bytes[at + first], &rows.bytes[at] + end, static_cast<std::byte>(code));
    }
    const Weights weights({rows}, {{0, 256}});
    constexpr int n_rows = 30;
    const linalg::Matrix x("x", n_rows, 256), y("y", n_rows, 16);
    for (int m = 0; m < n_rows; ++m) {
      for (int k = 0; k < 256; ++k) x(m, k) = m % 2 == 0 ? 127 : -127;
    }
    Levels::for_each([&] {
      linalg::LinearMap()(ExecutionSpace(), x,
                          linalg::LinearWeights(kvzap::DType::f32, weights.matrix),
                          linalg::ConstVector(), y);
      for (int n = 0; n < 16; ++n) {
        double sum = 0, terms = 0;
        for (const float value : weights.values[n]) sum += 127.0 * value, terms += std::fabs(value);
        for (int m = 0; m < n_rows; ++m) {
          ASSERT_NEAR(y(m, n), m % 2 == 0 ? sum : -sum, 1e-4 * terms) << code << ' ' << m;
        }
      }
    });
  }
}

/// The kernels for tensor cores lose no more than 2^-17 of x: any number of rows, of outputs and of
/// groups of inputs, inputs that end within a block.
TEST_P(QuantisedFormat, TensorCoresAgreeWithDoublePrecision) {
  if (!base::cuda::has_tensor_cores()) GTEST_SKIP() << "the machine has none";
  std::mt19937 random(12);
  const StoredRows stored(GetParam(), 37, 1280, random);
  for (const std::int64_t inputs : {1280, 500}) {
    const Weights weights({stored}, {{0, inputs}});
    const std::int64_t outputs = weights.matrix->outputs();
    for (const std::int64_t rows : {1, 5, 8, 9, 16}) {
      SCOPED_TRACE(std::to_string(rows) + " rows of " + std::to_string(inputs));
      const linalg::Matrix x = random_rows(rows, inputs, random), y("y", rows, outputs);
      const ExecutionSpace exec;
      if (!linalg::tensor_cores::multiply_quantised(exec, x, *weights.matrix, linalg::ConstVector(),
                                                    y)) {
        ASSERT_TRUE(weights.matrix->has_floats());
        return;
      }
      exec.fence();
      const auto host_x = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), x);
      const auto host_y = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), y);
      for (std::int64_t m = 0; m < rows; ++m) {
        for (std::int64_t n = 0; n < outputs; ++n) {
          double sum = 0, size = 0;
          for (std::int64_t k = 0; k < inputs; ++k) {
            const double product = double{weights.values[n][k]} * double{host_x(m, k)};
            sum += product;
            size += std::fabs(product);
          }
          ASSERT_NEAR(host_y(m, n), sum, 2e-5 * size) << m << ' ' << n;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, QuantisedFormat, ::testing::ValuesIn(names),
                         [](const auto& test) { return std::string(test.param); });

/// Products of any rows, also with gaps between them, with parts of several formats, ranges of
/// columns and biases. Bytes and
/// bf16 keep each x or w within 1/254 and 1/256 of its group's largest.
class QuantisedMap : public ::testing::Test {
 protected:
  template <class Value>
  void check(const Weights& weights, std::int64_t rows, bool biased, std::mt19937& random) {
    const std::int64_t outputs = weights.matrix->outputs();
    const std::int64_t inputs = weights.matrix->inputs();
    SCOPED_TRACE("rows " + std::to_string(rows) + " outputs " + std::to_string(outputs));
    const linalg::Matrix wide_x = random_rows(rows, inputs + (biased ? 0 : 5), random);
    const linalg::Matrix x(
        Kokkos::subview(wide_x, Kokkos::ALL, std::make_pair(std::int64_t{0}, inputs)));
    const linalg::Vector bias("bias", biased ? outputs : 0);
    const auto host_bias = Kokkos::create_mirror_view(bias);
    for (std::size_t n = 0; n < bias.extent(0); ++n) host_bias(n) = uniform(random);
    Kokkos::deep_copy(bias, host_bias);
    const linalg::Matrix wide("wide", rows, outputs + 3);
    const linalg::Matrix y(
        Kokkos::subview(wide, Kokkos::ALL, std::make_pair(std::int64_t{0}, outputs)));
    m_map(ExecutionSpace(), x, linalg::LinearWeights(kvzap::DTypeOf<Value>::value, weights.matrix),
          bias, y);
    const auto host_x = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), wide_x);
    const auto host_y = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), wide);
    for (std::int64_t m = 0; m < rows; ++m) {
      for (std::int64_t n = 0; n < outputs; ++n) {
        double sum = biased ? host_bias(n) : 0.0;
        double bound = 1e-6 * std::fabs(sum);
        for (std::int64_t k = 0; k < inputs; ++k) {
          const double w = weights.values[n][k];
          sum += w * host_x(m, k);
          const int exponent = weights.is_shuffled ? 2 : static_cast<int>(k / 32 % 5) - 2;
          const double largest = std::ldexp(1.0, exponent);
          bound += std::fabs(w) * std::max(largest / 127, std::fabs(host_x(m, k)) / 100.0);
        }
        ASSERT_NEAR(host_y(m, n), sum, bound) << m << ' ' << n;
        errors += std::fabs(host_y(m, n) - sum) / bound;
        ++elements;
      }
      for (int i = 0; i < 3; ++i) ASSERT_EQ(host_y(m, outputs + i), 0);
    }
  }

  double errors = 0;
  std::int64_t elements = 0;
  linalg::LinearMap m_map;
};

TEST_F(QuantisedMap, AnyShapeAtEveryLevel) {
  const Levels levels;
  std::mt19937 random(5);
  const std::vector<StoredRows> mixed = {
      {"Q4_K", 30, 768, random}, {"Q6_K", 16, 768, random}, {"Q5_0", 75, 768, random}};
  const std::vector<StoredRows> small = {{"Q8_0", 65, 96, random}};
  const std::vector<StoredRows> one = {{"MXFP4", 1, 64, random}};
  const Weights whole(mixed, {{0, 768}});
  const Weights cut(mixed, {{64, 192}, {320, 384}, {384, 500}});
  const Weights narrow(small, {{0, 96}});
  const Weights cut_narrow(small, {{16, 48}, {64, 80}});
  const Weights single(one, {{0, 64}});
  const std::vector<StoredRows> floats = {{"F8_E4M3", 50, 640, random}};
  const Weights whole_floats(floats, {{0, 640}});
  const Weights cut_floats(floats, {{100, 130}, {200, 600}});
  const Weights shuffled = Weights::shuffled(mixed, some_places(768, 700, random));
  Levels::for_each([&] {
    for (const std::int64_t rows : {1, 2, 7, 16, 31, 32, 33, 64, 100, 257, 800}) {
      for (const Weights* weights :
           {&whole, &cut, &narrow, &cut_narrow, &single, &whole_floats, &cut_floats, &shuffled}) {
        // Many rows take long: each kind of code meets them once.
        if (rows > 100 && weights != &whole && weights != &whole_floats) continue;
        check<bfloat16>(*weights, rows, rows % 2 == 0, random);
      }
    }
  });
  EXPECT_LT(errors / static_cast<double>(elements), 0.1);
}

/// Products of many rows by bytes, which some levels take in builds without oneDNN alone. A row's
/// products do not depend on the other rows.
TEST_F(QuantisedMap, ManyRowsByBytesAtEveryLevel) {
  if (!base::runs_on_host) GTEST_SKIP() << "host kernels";
  const Levels levels;
  std::mt19937 random(11);
  const std::vector<StoredRows> mixed = {
      {"Q4_K", 30, 512, random}, {"Q6_K", 16, 512, random}, {"Q5_0", 75, 512, random}};
  const Weights weights(mixed, {{0, 256}, {290, 512}});
  const std::int64_t inputs = weights.matrix->inputs(), outputs = weights.matrix->outputs();
  for (const std::int64_t rows : {33, 64, 100, 257, 800}) {
    const linalg::Matrix x = random_rows(rows, inputs, random);
    constexpr std::int64_t some = 33;
    const linalg::Matrix y("y", rows, outputs), part("part", some, outputs);
    Levels::for_each([&] {
      Kokkos::View<std::uint8_t*, MemorySpace> buffer;
      quantised::multiply_blocks(x, *weights.matrix, linalg::ConstVector(), buffer, y);
      for (const std::int64_t m : {std::int64_t{0}, rows / 2, rows - 1}) {
        const std::int64_t first = std::min(m, rows - some);
        quantised::multiply_blocks(
            Kokkos::subview(x, std::make_pair(first, first + some), Kokkos::ALL), *weights.matrix,
            linalg::ConstVector(), buffer, part);
        for (std::int64_t n = 0; n < outputs; ++n) {
          ASSERT_EQ(y(m, n), part(m - first, n)) << m << ' ' << n;
        }
      }
    });
  }
}

TEST_F(QuantisedMap, RuleOfRowsThatTakeBytes) {
  const Levels levels;
  std::mt19937 random(10);
  const Weights integers({{"Q4_K", 16, 256, random}}, {{0, 256}});
  const Weights floats({{"F8_E4M3", 16, 256, random}}, {{0, 256}});
  Levels::for_each([&] {
    const std::int64_t most = quantised::most_rows_by_blocks();
    const bool any = most == quantised::any_rows;
    EXPECT_TRUE(any || most == 32);
    EXPECT_TRUE(any || base::machine().simd() != base::SimdLevel::avx2);
    EXPECT_TRUE(quantised::prefers_blocks(32, *integers.matrix));
    EXPECT_EQ(quantised::prefers_blocks(33, *integers.matrix), any);
    EXPECT_EQ(quantised::prefers_blocks(4096, *integers.matrix), any);
    EXPECT_TRUE(quantised::prefers_blocks(32, *floats.matrix));
    EXPECT_FALSE(quantised::prefers_blocks(33, *floats.matrix));
    EXPECT_EQ(quantised::byte_products_text(),
              std::string(base::name_of(base::byte_products())) +
                  (any ? ", any number of rows" : ", up to 32 rows"));
  });
}

TEST_F(QuantisedMap, DeviceKernels) {
  std::mt19937 random(6);
  const std::vector<StoredRows> mixed = {{"Q4_1", 30, 512, random}, {"Q6_K", 17, 512, random}};
  const Weights whole(mixed, {{0, 512}});
  const Weights cut(mixed, {{64, 192}, {320, 500}});
  const Weights floats({{"F8_E4M3", 20, 256, random}}, {{32, 256}});
  const Weights shuffled = Weights::shuffled(mixed, some_places(512, 512, random));
  const bool was_device = base::machine().on_device();
  base::machine().set_device(true);
  for (const std::int64_t rows : {1, 3, 16, 40}) {
    for (const Weights* weights : {&whole, &cut, &floats, &shuffled}) {
      check<float>(*weights, rows, true, random);
      check<bfloat16>(*weights, rows, false, random);
      check<kvzap::half>(*weights, rows, true, random);
    }
  }
  base::machine().set_device(was_device);
}

// So many outputs that a block takes several panels, the last block fewer.
TEST_F(QuantisedMap, ManyOutputsByTensorCores) {
  if (!base::cuda::has_tensor_cores()) GTEST_SKIP() << "the machine has none";
  std::mt19937 random(13);
  const Weights weights({{"Q4_1", 16 * 1025 + 3, 96, random}}, {{0, 96}});
  const bool was_device = base::machine().on_device();
  base::machine().set_device(true);
  for (const std::int64_t rows : {2, 3, 12}) check<bfloat16>(weights, rows, true, random);
  // Of more than 8 rows a block takes two panels if there are more than multiprocessors, here 8.
  for (const char* const format : {"Q4_K", "Q5_K", "Q6_K", "Q4_0"}) {
    const Weights some({{format, 16 * 10 + 3, 1280, random}}, {{0, 1280}});
    for (const std::int64_t rows : {9, 16}) check<bfloat16>(some, rows, true, random);
  }
  base::machine().set_device(was_device);
}

TEST_F(QuantisedMap, NoNumberSpreadsToItsRowAlone) {
  const Levels levels;
  std::mt19937 random(7);
  const Weights weights({{"Q4_0", 20, 128, random}}, {{0, 128}});
  const linalg::Matrix x = random_rows(3, 128, random), y("y", 3, 20);
  const auto host_x = Kokkos::create_mirror_view(x);
  Kokkos::deep_copy(host_x, x);
  host_x(1, 70) = std::nanf("");
  Kokkos::deep_copy(x, host_x);
  Levels::for_each([&] {
    m_map(ExecutionSpace(), x, linalg::LinearWeights(kvzap::DType::bf16, weights.matrix),
          linalg::ConstVector(), y);
    const auto host_y = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), y);
    for (int n = 0; n < 20; ++n) {
      EXPECT_TRUE(std::isfinite(host_y(0, n)) && std::isnan(host_y(1, n)) &&
                  std::isfinite(host_y(2, n)));
    }
  });
}

TEST_F(QuantisedMap, RowsAndColumnsAreLookedUp) {
  std::mt19937 random(8);
  const std::vector<StoredRows> parts = {{"Q5_1", 20, 96, random}, {"Q8_0", 30, 96, random}};
  const Weights weights = Weights::shuffled(parts, some_places(96, 96, random));
  const Kokkos::View<TokenId*, MemorySpace> ids("ids", 4);
  const auto host_ids = Kokkos::create_mirror_view(ids);
  const TokenId wanted[] = {107, 149, 99, 150};  // the last two belong to other ranks
  std::copy_n(wanted, 4, host_ids.data());
  Kokkos::deep_copy(ids, host_ids);
  const linalg::Matrix h("h", 4, 96), columns("columns", 5, 50);
  Kokkos::deep_copy(h, 7.0f);
  quantised::look_up(ExecutionSpace(), *weights.matrix, ids, 100, h);
  quantised::take_inputs(ExecutionSpace(), *weights.matrix, 30, columns);
  const auto host_h = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), h);
  const auto host_columns = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), columns);
  for (int k = 0; k < 96; ++k) {
    EXPECT_EQ(host_h(0, k), weights.values[7][k]);
    EXPECT_EQ(host_h(1, k), weights.values[49][k]);
    EXPECT_EQ(host_h(2, k), 0);
    EXPECT_EQ(host_h(3, k), 0);
  }
  for (int i = 0; i < 5; ++i) {
    for (int n = 0; n < 50; ++n) EXPECT_EQ(host_columns(i, n), weights.values[n][30 + i]);
  }
}

}  // namespace
