// Products of 8-bit floats: rounding of x, the copies of weights, the layout that cuBLASLt reads,
// and whole products against sums of what was rounded.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/machine.hpp"
#include "linalg/device/float8.hpp"
#include "linalg/device/library_call.hpp"
#include "linalg/gemm.hpp"

namespace {

using namespace kvzap;
using linalg::Float8Rows;
namespace quantised = linalg::quantised;
using Bytes = Kokkos::View<std::uint8_t*, MemorySpace>;

float uniform(std::mt19937& random) { return static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f; }

double value_of(int code) {
  if ((code & 127) == 127) return std::nan("");
  const int exponent = code >> 3 & 15;
  const double size = std::ldexp((code & 7) + (exponent > 0 ? 8 : 0), std::max(exponent, 1) - 10);
  return code < 128 ? size : -size;
}

/// The nearest code, of two the even one.
int nearest(double x) {
  static const std::vector<double> values = [] {
    std::vector<double> all;
    for (int code = 0; code < 127; ++code) all.push_back(value_of(code));
    return all;
  }();
  if (std::isnan(x)) return 127;
  const double size = std::fabs(x);
  const auto above = std::lower_bound(values.begin(), values.end(), size);
  int best = static_cast<int>(std::min(above, values.end() - 1) - values.begin());
  if (best > 0) {
    const double error = values[best] - size, other = size - values[best - 1];
    if (other < error || (other == error && best % 2 != 0)) --best;
  }
  return std::signbit(x) ? best | 128 : best;
}

TEST(Float8, CodesAreNearest) {
  for (int code = 0; code < 256; ++code) {
    if ((code & 127) == 127) continue;
    ASSERT_EQ(linalg::e4m3_code(static_cast<float>(value_of(code))), code);
    ASSERT_EQ(linalg::e4m3_or_nan(static_cast<std::uint8_t>(code)), value_of(code));
    if ((code & 127) == 126) continue;
    const auto middle = static_cast<float>((value_of(code) + value_of(code + 1)) / 2);
    for (const float x : {std::nextafter(middle, -1e9f), middle, std::nextafter(middle, 1e9f)}) {
      ASSERT_EQ(linalg::e4m3_code(x), nearest(x)) << x;
    }
  }
  std::mt19937 random(1);
  for (int i = 0; i < 100000; ++i) {
    const float x = uniform(random) * std::ldexp(1.0f, static_cast<int>(random() % 24) - 14);
    if (std::fabs(x) <= 448) {
      ASSERT_EQ(linalg::e4m3_code(x), nearest(x)) << x;
    }
  }
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float large : {449.0f, 464.0f, 1e30f, infinity}) {
    EXPECT_EQ(linalg::e4m3_code(large), 0x7e);
    EXPECT_EQ(linalg::e4m3_code(-large), 0xfe);
  }
  EXPECT_EQ(linalg::e4m3_code(std::nanf("")) & 0x7f, 0x7f);
  EXPECT_TRUE(std::isnan(linalg::e4m3_or_nan(0x7f)) && std::isnan(linalg::e4m3_or_nan(0xff)));
}

/// Rows in memory of the device.
struct Room {
  Bytes codes;
  linalg::Vector scales;
  Float8Rows rows;

  Room(std::int64_t count, std::int64_t inputs, std::int64_t block = 128)
      : codes("codes", count * inputs), scales("scales", count * inputs / block) {
    Kokkos::deep_copy(codes, std::uint8_t{77});
    Kokkos::deep_copy(scales, 77.0f);
    rows = {codes.data(), scales.data(), count, inputs, block};
  }
  auto host_codes() const {
    return Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), codes);
  }
  auto host_scales() const {
    return Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), scales);
  }
};

/// x as the products take it: code times scale, by a search for the nearest code.
struct Rounded {
  std::vector<int> codes;
  std::vector<float> scales;  // (row, block)
  std::size_t block;

  /// x: whole blocks.
  explicit Rounded(const std::vector<float>& x, std::size_t shared = 128) : block(shared) {
    for (std::size_t first = 0; first < x.size(); first += block) {
      float largest = 0x1p-100f;
      for (std::size_t i = 0; i < block; ++i) {
        if (std::fabs(x[first + i]) > largest) largest = std::fabs(x[first + i]);
      }
      scales.push_back(largest / 448);
      for (std::size_t i = 0; i < block; ++i) {
        codes.push_back(nearest(x[first + i] * (448 / largest)));
      }
    }
  }
  double operator[](std::size_t i) const { return value_of(codes[i]) * double{scales[i / block]}; }
};

TEST(Float8, RowsAreRounded) {
  constexpr std::int64_t rows = 7, inputs = 384;
  std::mt19937 random(2);
  std::vector<float> values(rows * inputs);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = uniform(random) * std::ldexp(1.0f, static_cast<int>(i / 128 % 9) * 10 - 40);
  }
  std::fill_n(values.begin() + inputs, 128, 0.0f);        // a block of zeros
  std::fill_n(values.begin() + 2 * inputs, 128, 1e-38f);  // of numbers that vanish
  values[3 * inputs + 5] = std::nanf("");
  values[4 * inputs + 9] = 3e38f;
  values[5 * inputs + 9] = std::numeric_limits<float>::infinity();
  const linalg::Matrix x("x", rows, inputs);
  const auto host = Kokkos::create_mirror_view(x);
  std::copy(values.begin(), values.end(), host.data());
  Kokkos::deep_copy(x, host);
  const ExecutionSpace exec;
  for (const std::int64_t block : {std::int64_t{128}, inputs}) {
    const Room room(16, inputs, block);
    linalg::round_to_float8(exec, x, room.rows);
    exec.fence();
    const auto codes = room.host_codes();
    const auto scales = room.host_scales();
    const Rounded expected(values, block);
    const std::int64_t blocks = inputs / block;
    for (std::int64_t m = 0; m < 16; ++m) {
      for (std::int64_t l = 0; l < blocks; ++l) {
        const float scale = scales(l * 16 + m);  // blocks follow one another, rows within
        ASSERT_EQ(scale, m < rows ? expected.scales[m * blocks + l] : 0.0f) << m << ' ' << l;
      }
      for (std::int64_t k = 0; k < inputs; ++k) {
        const int wanted = m < rows ? expected.codes[m * inputs + k] : 0;
        const int found = codes(m * inputs + k);
        if (wanted == 127) {
          ASSERT_EQ(found & 127, 127);
        } else {
          ASSERT_EQ(found, wanted) << m << ' ' << k;
        }
      }
    }
  }
}

/// Weights of e4m3 with other scales for each output, and for each block unless `one_scale`; some
/// outputs in sections of their own.
struct Weights {
  std::shared_ptr<quantised::Matrix> matrix;
  std::vector<std::vector<float>> values;  // by columns of x
  std::vector<std::int64_t> places;        // of the columns in panels

  Weights(const std::vector<std::int64_t>& parts, std::int64_t stored,
          const std::vector<std::pair<std::int64_t, std::int64_t>>& columns, std::mt19937& random,
          bool one_scale = false) {
    const quantised::Format* const format = quantised::find_format("F8_E4M3");
    std::vector<quantised::Matrix::Part> all;
    std::int64_t outputs = 0;
    for (const std::int64_t part : parts) {
      all.push_back({format, part});
      outputs += part;
    }
    matrix = std::make_shared<quantised::Matrix>(all, columns);
    std::int64_t place = 0;
    for (const auto& [begin, end] : columns) {
      const std::int64_t first = begin / 128 * 128;
      for (std::int64_t k = begin; k < end; ++k) places.push_back(place + k - first);
      place += (end + 127) / 128 * 128 - first;
    }
    std::vector<std::vector<std::byte>> rows(outputs);
    for (auto& row : rows) {
      std::vector<float> own;
      float scale = 0;
      for (std::int64_t block = 0; block < stored / 128; ++block) {
        if (block == 0 || !one_scale) scale = 1e-3f * (2 + uniform(random));
        row.resize(row.size() + 132);
        std::byte* const target = row.data() + row.size() - 132;
        std::memcpy(target, &scale, sizeof(scale));
        for (int i = 0; i < 128; ++i) {
          int code = static_cast<int>(random() % 256);
          if ((code & 127) == 127) code = 0;
          target[4 + i] = static_cast<std::byte>(code);
          own.push_back(scale * static_cast<float>(value_of(code)));
        }
      }
      values.emplace_back();
      for (const auto& [begin, end] : columns) {
        values.back().insert(values.back().end(), own.begin() + begin, own.begin() + end);
      }
    }
    const quantised::Matrix::Data data("data", matrix->bytes());
    const auto host = Kokkos::create_mirror_view(data);
    matrix->place(data);
    std::vector<const std::byte*> pointers;
    for (const auto& row : rows) pointers.push_back(row.data());
    for (std::int64_t i = 0; i < matrix->n_panels(); ++i) {
      const auto [section, panel] = matrix->panel(i);
      matrix->pack(i, pointers.data() + section->first + panel * quantised::panel_outputs,
                   host.data());
    }
    matrix->find_scales(host.data());
    Kokkos::deep_copy(data, host);
  }
};

TEST(Float8, WeightsAreCopiedAsRows) {
  std::mt19937 random(3);
  const ExecutionSpace exec;
  for (const bool one_scale : {false, true}) {
    const Weights weights({30, 16, 75}, 256, {{0, 256}}, random, one_scale);
    const std::int64_t block = one_scale ? 256 : 128;
    for (const std::int64_t begin : {0, 16, 32, 96}) {
      const Room room(48, 256, block);
      linalg::copy_float8(exec, *weights.matrix, begin, room.rows);
      exec.fence();
      const auto codes = room.host_codes();
      const auto scales = room.host_scales();
      for (std::int64_t i = 0; i < 48; ++i) {
        for (std::int64_t k = 0; k < 256; ++k) {
          const float wanted = begin + i < 121 ? weights.values[begin + i][k] : 0.0f;
          const float scale = scales(k / block * 48 + i);
          ASSERT_EQ(scale * static_cast<float>(value_of(codes(i * 256 + k))), wanted)
              << begin + i << ' ' << k;
        }
      }
    }
  }
}

TEST(Float8, ScalesOfOutputsAreFound) {
  std::mt19937 random(6);
  EXPECT_TRUE(Weights({30, 16}, 384, {{0, 384}}, random, true).matrix->has_scales_of_outputs());
  // Cut columns hold whole blocks.
  EXPECT_TRUE(
      Weights({7}, 384, {{5, 9}, {300, 384}}, random, true).matrix->has_scales_of_outputs());
  EXPECT_TRUE(Weights({40}, 384, {{3, 100}}, random).matrix->has_scales_of_outputs());
  EXPECT_FALSE(Weights({40}, 384, {{0, 384}}, random).matrix->has_scales_of_outputs());
  const quantised::Format* const q8_0 = quantised::find_format("Q8_0");
  quantised::Matrix integers({{q8_0, 16}}, {{0, 64}});
  const std::vector<std::uint8_t> panels(integers.bytes());
  integers.find_scales(panels.data());
  EXPECT_FALSE(integers.has_scales_of_outputs());
}

// The library's matrices by columns, and its scales: element (i, j) of op(a) op(b).
double result_of(const linalg::LibraryCall& call, std::int64_t i, std::int64_t j) {
  const auto* const a = static_cast<const std::uint8_t*>(call.a_data);
  const auto* const b = static_cast<const std::uint8_t*>(call.b_data);
  double sum = 0;
  for (std::int64_t k = 0; k < call.a.rows; ++k) {
    double product = value_of(a[i * call.a.stride + k]) * value_of(b[j * call.b.stride + k]);
    if (call.a_scales != nullptr) {
      const std::int64_t l = k / 128;
      product *= double{call.a_scales[l * call.d.rows + i]};
      product *= double{call.b_scales[l * call.d.columns + j]};
    }
    sum += product;
  }
  return sum;
}

class Float8Call : public ::testing::TestWithParam<int> {};

TEST_P(Float8Call, SaysWhatTheProductIs) {
  if (!base::runs_on_host) GTEST_SKIP() << "reads the memory of a host";
  std::mt19937 random(4);
  Room a(32, 256, GetParam()), b(48, 256, GetParam());
  for (Room* room : {&a, &b}) {
    for (std::size_t i = 0; i < room->codes.extent(0); ++i) {
      room->codes(i) = linalg::e4m3_code(400 * uniform(random));
    }
    for (std::size_t i = 0; i < room->scales.extent(0); ++i) room->scales(i) = uniform(random);
  }
  const linalg::Matrix c("c", 32, 52);
  const linalg::Float8Product product{a.rows, b.rows, c.data(), 52};
  const linalg::LibraryCall call = linalg::library_call(product);
  EXPECT_TRUE(call.a_transposed && !call.b_transposed);
  EXPECT_EQ(call.a.rows, call.b.rows);
  EXPECT_EQ(call.a.columns, call.d.rows);
  EXPECT_EQ(call.b.columns, call.d.columns);
  EXPECT_EQ(call.bias, nullptr);
  for (const std::int64_t aligned : {call.a.stride, call.b.stride, call.a.rows}) {
    EXPECT_EQ(aligned % 16, 0);
  }
  for (const std::int64_t by_4 : {call.d.rows, call.d.columns, call.d.stride}) {
    EXPECT_EQ(by_4 % 4, 0);
    EXPECT_EQ(linalg::choice_of(call).d.columns % 4, 0);
  }
  linalg::LibraryCall other = call;
  other.a_scales = other.b_scales = call.a_scales == nullptr ? a.scales.data() : nullptr;
  EXPECT_NE(linalg::key_of(call), linalg::key_of(other));
  const ExecutionSpace exec;
  linalg::multiply(exec, product);
  exec.fence();
  for (std::int64_t m = 0; m < 32; ++m) {
    for (std::int64_t n = 0; n < 48; ++n) {
      const double expected = result_of(call, n, m);
      ASSERT_NEAR(c(m, n), expected, 1e-5 * std::fabs(expected) + 0.5);
    }
    ASSERT_EQ(c(m, 48), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(InputsOfAScale, Float8Call, ::testing::Values(128, 256));

// A host's products are kernels of kvzap, which can be counted.
constexpr int on_host = base::runs_on_host ? 1 : 0;
int n_products = 0;

/// Whole maps on the kernels of devices.
class Float8Map : public ::testing::Test {
 protected:
  Float8Map() : m_before(base::machine().on_device()) {
    base::machine().set_device(true);
    setenv("KVZAP_FP8", "on", 1);
  }
  ~Float8Map() override {
    unsetenv("KVZAP_FP8");
    linalg::float8_copied_bytes = m_bytes;
    base::machine().set_device(m_before);
  }
  Float8Map(const Float8Map&) = delete;
  Float8Map& operator=(const Float8Map&) = delete;

  /// Returns the products of 8-bit floats that the map has made.
  int check(const Weights& weights, std::int64_t rows, bool biased, std::int64_t margin) {
    SCOPED_TRACE("rows " + std::to_string(rows));
    const std::int64_t outputs = weights.matrix->outputs(), inputs = weights.matrix->inputs();
    const linalg::Matrix wide_x("x", rows, inputs + margin), wide_y("y", rows, outputs + margin);
    const linalg::Matrix x(Kokkos::subview(wide_x, Kokkos::ALL, std::make_pair(0L, inputs)));
    const linalg::Matrix y(Kokkos::subview(wide_y, Kokkos::ALL, std::make_pair(0L, outputs)));
    const linalg::Vector bias("bias", biased ? outputs : 0);
    const auto host_x = Kokkos::create_mirror_view(wide_x);
    const auto host_bias = Kokkos::create_mirror_view(bias);
    for (std::size_t i = 0; i < host_x.size(); ++i) host_x.data()[i] = uniform(random);
    for (std::size_t i = 0; i < host_bias.size(); ++i) host_bias(i) = uniform(random);
    Kokkos::deep_copy(wide_x, host_x);
    Kokkos::deep_copy(bias, host_bias);
    namespace tools = Kokkos::Tools::Experimental;
    n_products = 0;
    tools::set_begin_parallel_for_callback(
        [](const char* label, const std::uint32_t, std::uint64_t*) {
          if (std::string(label) == "kvzap::product::float8") ++n_products;
        });
    const ExecutionSpace exec;
    map(exec, x, linalg::LinearWeights(DType::bf16, weights.matrix), bias, y);
    exec.fence();
    tools::set_begin_parallel_for_callback(nullptr);
    const auto found = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), wide_y);
    const linalg::Float8Scales scales = linalg::float8_scales(exec, *weights.matrix);
    const bool rounds = rows >= 32 && scales != linalg::Float8Scales::none;
    // Tensor cores keep about 14 bits of sums of 8-bit floats.
    const double exact = base::runs_on_host ? 1e-6 : 0x1p-11;
    const std::int64_t padded = weights.matrix->padded_inputs();
    for (std::int64_t m = 0; m < rows; ++m) {
      std::vector<float> own(padded);
      for (std::int64_t k = 0; k < inputs; ++k) own[weights.places[k]] = host_x(m, k);
      const Rounded rounded(own, scales == linalg::Float8Scales::rows ? padded : 128);
      for (std::int64_t n = 0; n < outputs; ++n) {
        double sum = biased ? host_bias(n) : 0.0f, size = 1;
        for (std::int64_t k = 0; k < inputs; ++k) {
          const double left = rounds ? rounded[weights.places[k]] : double{host_x(m, k)};
          sum += left * weights.values[n][k];
          size += std::fabs(left * weights.values[n][k]);
        }
        EXPECT_NEAR(found(m, n), sum, (rounds ? exact : 0x1p-7) * size) << m << ' ' << n;
        if (::testing::Test::HasFailure()) return n_products;
      }
      for (std::int64_t i = outputs; i < outputs + margin; ++i) EXPECT_EQ(found(m, i), 0);
    }
    return n_products;
  }

  linalg::LinearMap map;
  std::mt19937 random{5};

 private:
  bool m_before;
  std::int64_t m_bytes = linalg::float8_copied_bytes;
};

TEST_F(Float8Map, RowsOfAnyNumber) {
  const Weights whole({64}, 256, {{0, 256}}, random);
  const Weights ragged({30, 16, 7}, 256, {{0, 256}}, random);
  const Weights cut({40}, 640, {{100, 130}, {200, 600}}, random);
  const Weights by_outputs({30, 16, 7}, 640, {{100, 130}, {200, 600}}, random, true);
  for (const std::int64_t rows : {32, 47}) {
    for (const bool biased : {false, true}) {
      for (const Weights* weights : {&whole, &ragged, &cut, &by_outputs}) {
        EXPECT_EQ(check(*weights, rows, biased, 0), on_host);
        EXPECT_EQ(check(*weights, rows, biased, 3), on_host);
      }
    }
  }
  // Fewer rows keep x.
  for (const std::int64_t rows : {1, 5, 31}) EXPECT_EQ(check(cut, rows, true, 0), 0);
}

TEST_F(Float8Map, PartsOfOutputs) {
  const Weights weights({30, 91}, 256, {{0, 256}}, random);
  linalg::float8_copied_bytes = 48 * 256;
  EXPECT_EQ(check(weights, 32, true, 3), 3 * on_host);
  EXPECT_EQ(check(weights, 35, false, 0), 3 * on_host);
  const Weights by_outputs({30, 91}, 256, {{0, 256}}, random, true);
  EXPECT_EQ(check(by_outputs, 35, true, 0), 3 * on_host);
  const Weights even({128}, 256, {{0, 256}}, random);
  EXPECT_EQ(check(even, 48, true, 0), 3 * on_host);
}

TEST_F(Float8Map, OnlyIfAsked) {
  using linalg::Float8Scales;
  const ExecutionSpace exec;
  const Weights blocks({16}, 256, {{0, 256}}, random);
  const Weights rows({16}, 256, {{0, 256}}, random, true);
  if (base::runs_on_host) {
    EXPECT_EQ(linalg::float8_scales(exec, *blocks.matrix), Float8Scales::blocks);
    EXPECT_EQ(linalg::float8_scales(exec, *rows.matrix), Float8Scales::rows);
    base::machine().set_device(false);
    EXPECT_EQ(linalg::float8_scales(exec, *rows.matrix), Float8Scales::none);
    base::machine().set_device(true);
  }
  unsetenv("KVZAP_FP8");
  EXPECT_EQ(linalg::float8_scales(exec, *rows.matrix), Float8Scales::none);
  setenv("KVZAP_FP8", "off", 1);
  EXPECT_EQ(linalg::float8_scales(exec, *rows.matrix), Float8Scales::none);
  setenv("KVZAP_FP8", "maybe", 1);
  EXPECT_THROW(linalg::float8_scales(exec, *rows.matrix), Error);
}

}  // namespace
