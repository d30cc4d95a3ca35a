#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <kvzap/core/types.hpp>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "base/simd.hpp"
#include "base/vec.hpp"

namespace kvzap::test {

/// The lanes of each operation's result.
using Results = std::map<std::string, std::vector<float>>;

}  // namespace kvzap::test

#define KVZAP_LEVEL_BODY "unit/base/test_vec.inc"
#include "base/each_level.hpp"

namespace kvzap::test {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

/// The same bits, or both NaN.
void expect_same(float found, float expected, const std::string& what) {
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(found)) << what << " is " << found;
  } else {
    EXPECT_EQ(base::float_bits(found), base::float_bits(expected))
        << what << " is " << found << ", expected " << expected;
  }
}

void check(const Results& results, int lanes, const float* a, const float* b, const float* c) {
  const auto expect = [&](const std::string& name, auto value_of) {
    const std::vector<float>& found = results.at(name);
    ASSERT_EQ(static_cast<int>(found.size()), lanes);
    for (int i = 0; i < lanes; ++i) {
      expect_same(found[i], value_of(i), name + " of lane " + std::to_string(i));
    }
  };
  /// One rounding or two.
  const auto expect_fused = [&](const std::string& name, auto once, auto twice) {
    for (int i = 0; i < lanes; ++i) {
      const float found = results.at(name)[i];
      expect_same(found, found == twice(i) ? twice(i) : once(i), name);
    }
  };
  expect("zero", [](int) { return 0.0f; });
  expect("all", [&](int) { return a[1]; });
  expect("load", [&](int i) { return a[i]; });
  expect("add", [&](int i) { return a[i] + b[i]; });
  expect("subtract", [&](int i) { return a[i] - b[i]; });
  expect("multiply", [&](int i) { return a[i] * b[i]; });
  const auto product = [&](int i) {
    volatile float rounded = a[i] * b[i];
    return rounded;
  };
  expect_fused(
      "fma", [&](int i) { return std::fma(a[i], b[i], c[i]); },
      [&](int i) { return product(i) + c[i]; });
  expect_fused(
      "fms", [&](int i) { return std::fma(a[i], b[i], -c[i]); },
      [&](int i) { return product(i) - c[i]; });
  expect_fused(
      "fnma", [&](int i) { return std::fma(-a[i], b[i], c[i]); },
      [&](int i) { return c[i] - product(i); });
  expect("max", [&](int i) { return a[i] > b[i] ? a[i] : b[i]; });
  expect("abs", [&](int i) { return std::fabs(a[i]); });
  expect("greater", [&](int i) { return a[i] > b[i] ? a[i] : c[i]; });
  expect("not_less", [&](int i) { return a[i] < b[i] ? 0.0f : c[i]; });
  expect("differs", [&](int i) { return a[i] != b[i] ? c[i] : 0.0f; });
  bool any = false;
  for (int i = 0; i < lanes; ++i) any = any || a[i] > b[i];
  expect("any", [&](int) { return any ? 1.0f : 0.0f; });
  expect("swap1", [&](int i) { return a[i ^ 1]; });
  expect("swap2", [&](int i) { return a[i ^ 2]; });
  expect("swap_halves", [&](int i) { return a[i ^ (lanes / 2)]; });
  for (int count = -1; count <= lanes + 1; ++count) {
    for (const std::string name : {"first ", "load_first "}) {
      expect(name + std::to_string(count), [&](int i) { return i < count ? a[i] : 0.0f; });
    }
  }
  for (const std::string name : {"halves", "stored_halves"}) {
    expect(name, [&](int i) { return static_cast<float>(half(a[i + 1])); });
  }
  for (const std::string name : {"bfloats", "rounded"}) {
    expect(name, [&](int i) { return static_cast<float>(bfloat16(a[i + 1])); });
  }
  expect("first_lane", [&](int) { return b[0]; });
  for (int i = 0; i < lanes; ++i) {
    for (int j = 0; j < lanes; ++j) {
      EXPECT_EQ(results.at("transpose")[j * 32 + i], static_cast<float>(i * lanes + j));
    }
  }
}

/// For numbers alone: whole numbers, so that the order of sums does not matter.
void check_numbers(const Results& results, int lanes, const float* a, const float* b,
                   const float* c) {
  for (int i = 0; i < lanes; ++i) {
    EXPECT_EQ(results.at("nearest")[i], std::nearbyint(a[i]));
    const float power = a[i] > b[i] ? std::ldexp(c[i], static_cast<int>(a[i + 1])) : 0.0f;
    expect_same(results.at("times_power_of_two")[i], power, "times_power_of_two");
    float sum = 0;
    for (int k = 0; k < lanes; ++k) sum += a[i + k];
    EXPECT_EQ(results.at("fold")[i], sum) << i;
  }
  float total = 0;
  for (int i = 0; i < lanes; ++i) total += a[i];
  EXPECT_EQ(results.at("total")[0], total);
  for (int i = 0; i < 4; ++i) {
    float sum = 0;
    for (int k = i; k < lanes; k += 4) sum += a[k];
    EXPECT_EQ(results.at("four")[i], sum);
  }
  for (int i = 0; lanes == 16 && i < lanes; ++i) {
    EXPECT_EQ(results.at("fraction")[i], 0.0f);
    EXPECT_EQ(results.at("power_of_floor")[i],
              std::ldexp(1.5f, static_cast<int>(std::floor(a[i] * 0.3f))));
  }
}

template <class Value, class Widen>
void check_widening(const Widen& widen, int lanes) {
  std::vector<Value> values;
  for (const float x : {0.0f, -0.0f, 1.5f, -65504.0f, 6e-8f, -3e-5f, infinity, -infinity, nan}) {
    values.emplace_back(x);
  }
  while (static_cast<int>(values.size()) < 2 * lanes) {
    values.emplace_back(0.37f * static_cast<float>(values.size()) - 3);
  }
  for (int count = 0; count < 2 * lanes; ++count) {
    // A copy of that length, so that a sanitizer finds reads after it.
    const std::vector<Value> part(values.begin(),
                                  values.begin() + (count == 0 ? 2 * lanes : count));
    const std::vector<float> found = widen(part.data(), count);
    for (int i = 0; i < 2 * lanes; ++i) {
      const bool read = count == 0 || i < count;
      expect_same(found[i], read ? static_cast<float>(values[i]) : 0.0f,
                  "value " + std::to_string(i) + " of " + std::to_string(count));
    }
  }
}

TEST(SimdVec, OperationsAgreeWithScalarCode) {
  alignas(64) float a[33], b[33], c[33];
  const auto check_level = [&](auto calculate, int lanes, bool numbers) {
    const Results results = calculate(a, b, c);
    check(results, lanes, a, b, c);
    if (numbers) check_numbers(results, lanes, a, b, c);
  };
  const auto check_all = [&](bool numbers) {
    check_level(baseline::calculate, baseline::V::lanes, numbers);
#if KVZAP_X86
    if (base::processor_has(base::SimdLevel::avx2)) {
      check_level(avx2::calculate, avx2::V::lanes, numbers);
    }
    if (base::processor_has(base::SimdLevel::avx512)) {
      check_level(avx512::calculate, avx512::V::lanes, numbers);
    }
#endif
  };
  for (int i = 0; i < 33; ++i) {
    a[i] = static_cast<float>(i * 37 % 41 - 20);
    b[i] = static_cast<float>(i * 29 % 23 - 11) * 0.3f;
    c[i] = 1.1f * static_cast<float>(i) - 7;
  }
  check_all(true);
  for (float& x : a) x = -infinity;  // none is greater
  check_all(false);
  const float special[] = {nan, infinity, -infinity, 0.0f, -0.0f, 1e-40f, 3e38f};
  for (int i = 0; i < 33; ++i) {
    a[i] = special[i % 7];
    b[i] = special[(i / 2) % 7];
  }
  check_all(false);
}

TEST(SimdVec, RowsAreWidened) {
  const auto check_types = [](const auto& widen, int lanes) {
    check_widening<float>(widen, lanes);
    check_widening<half>(widen, lanes);
    check_widening<bfloat16>(widen, lanes);
  };
  check_types([](const auto* p, int count) { return baseline::widen(p, count); },
              baseline::V::lanes);
#if KVZAP_X86
  if (base::processor_has(base::SimdLevel::avx2)) {
    check_types([](const auto* p, int count) { return avx2::widen(p, count); }, avx2::V::lanes);
  }
  if (base::processor_has(base::SimdLevel::avx512)) {
    check_types([](const auto* p, int count) { return avx512::widen(p, count); }, avx512::V::lanes);
  }
#endif
}

TEST(SimdVec, DotProductsOfPairs) {
  float a[33], b[33];
  for (int i = 0; i < 33; ++i) {
    a[i] = 0.1f * static_cast<float>(i) - 1;
    b[i] = 0.07f * static_cast<float>(i * 5 % 32) - 1;
  }
  bool checked = false;
#if KVZAP_X86
  if (base::processor_has(base::SimdLevel::avx512_bf16)) {
    avx512_bf16::check_pairs(a, b);
    checked = true;
  }
#elif KVZAP_NEON
  if (base::processor_has(base::SimdLevel::neon_bf16)) {
    neon_bf16::check_pairs(a, b);
    checked = true;
  }
#endif
  if (!checked) GTEST_SKIP() << "this processor has none";
}

}  // namespace
}  // namespace kvzap::test
