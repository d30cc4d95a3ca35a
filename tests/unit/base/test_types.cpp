#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <kvzap/core/types.hpp>
#include <limits>
#include <random>

#include "unit/temporary_folder.hpp"

namespace {

using kvzap::bfloat16;
using kvzap::DType;
using kvzap::half;
using kvzap::base::bits_float;
using kvzap::base::float_bits;

/// What IEEE 754 says of a 16-bit format: the conversions under test work on bits, the references
/// below on numbers.
template <class Value>
struct Format;
template <>
struct Format<half> {
  static constexpr int mantissa_bits = 10;
  static constexpr int bias = 15;
};
template <>
struct Format<bfloat16> {
  static constexpr int mantissa_bits = 7;
  static constexpr int bias = 127;
};

template <class Value>
Value from_bits(std::uint16_t bits) {
  Value value;
  value.bits = bits;
  return value;
}

/// The number after a bit pattern.
template <class Value>
double decode(std::uint16_t bits) {
  constexpr int mantissa_bits = Format<Value>::mantissa_bits;
  constexpr int top = 2 * Format<Value>::bias + 1;
  const int exponent = (bits & 0x7fff) >> mantissa_bits;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = (bits & 0x8000) ? -1 : 1;
  if (exponent == top) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  const int significand = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
  return sign *
         std::ldexp(significand, std::max(exponent, 1) - Format<Value>::bias - mantissa_bits);
}

/// The nearest number of the format; std::nearbyint rounds ties to even.
template <class Value>
double round_to_format(double x) {
  if (!std::isfinite(x) || x == 0) return x;
  const int exponent = std::max(std::ilogb(x), 1 - Format<Value>::bias);
  const double unit = std::ldexp(1.0, exponent - Format<Value>::mantissa_bits);
  const double rounded = std::nearbyint(x / unit) * unit;
  if (std::fabs(rounded) >= std::ldexp(1.0, Format<Value>::bias + 1)) {
    return std::copysign(std::numeric_limits<double>::infinity(), x);
  }
  return rounded;
}

template <class Value>
class SixteenBits : public ::testing::Test {
 protected:
  void expect_rounds(float x) {
    const double found = static_cast<float>(Value(x));
    const double expected = round_to_format<Value>(x);
    if (std::isnan(x) ? !std::isnan(found)
                      : found != expected || std::signbit(found) != std::signbit(expected)) {
      ADD_FAILURE() << std::hexfloat << x << " became " << found << ", expected " << expected;
    }
  }
};
using SixteenBitTypes = ::testing::Types<half, bfloat16>;
TYPED_TEST_SUITE(SixteenBits, SixteenBitTypes);

TYPED_TEST(SixteenBits, EveryPatternDecodesAndRoundTrips) {
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const float value = from_bits<TypeParam>(bits);
    const double expected = decode<TypeParam>(bits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << i;
      ASSERT_TRUE(std::isnan(static_cast<float>(TypeParam(value)))) << i;
    } else {
      ASSERT_EQ(value, expected) << i;
      ASSERT_EQ(std::signbit(value), std::signbit(expected)) << i;
      ASSERT_EQ(TypeParam(value).bits, bits);
    }
  }
}

// Every boundary between two neighbours, and the floats on both sides of it: covers ties to even,
// subnormals, the step into them and the step to infinity.
TYPED_TEST(SixteenBits, RoundsToNearestEvenAroundEveryBoundary) {
  constexpr int infinity_bits = (2 * Format<TypeParam>::bias + 1)
                                << Format<TypeParam>::mantissa_bits;
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (int i = 0; i < infinity_bits; ++i) {
    const double low = decode<TypeParam>(static_cast<std::uint16_t>(i));
    const double high = i + 1 == infinity_bits
                            ? std::ldexp(1.0, Format<TypeParam>::bias + 1)
                            : decode<TypeParam>(static_cast<std::uint16_t>(i + 1));
    const float middle = static_cast<float>((low + high) / 2);
    ASSERT_EQ(middle, (low + high) / 2);  // a float can hold it, so that it is a tie
    for (float x : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, infinity)}) {
      this->expect_rounds(x);
      this->expect_rounds(-x);
    }
  }
}

TYPED_TEST(SixteenBits, RoundsArbitraryFloats) {
  std::mt19937 random(1);
  for (int i = 0; i < 1000000; ++i) this->expect_rounds(bits_float(random()));
  for (std::uint32_t word : {0x00000000u, 0x00000001u, 0x007fffffu, 0x00800000u, 0x7f7fffffu,
                             0x7f800000u, 0x7f800001u, 0x7fbfffffu, 0x7fc00000u, 0x7fffffffu}) {
    this->expect_rounds(bits_float(word));
    this->expect_rounds(bits_float(word | 0x80000000u));
  }
}

TEST(Half, NamedValues) {
  EXPECT_EQ(half(1.0f).bits, 0x3c00);
  EXPECT_EQ(half(65504.0f).bits, 0x7bff);
  EXPECT_EQ(half(std::nextafter(65520.0f, 0.0f)).bits, 0x7bff);
  EXPECT_EQ(half(65520.0f).bits, 0x7c00);
  EXPECT_EQ(half(-1e30f).bits, 0xfc00);
  EXPECT_EQ(half(std::ldexp(1.0f, -24)).bits, 0x0001);
  EXPECT_EQ(half(std::ldexp(1.0f, -25)).bits, 0x0000);  // a tie, to even
  EXPECT_EQ(half(-0.0f).bits, 0x8000);
}

TEST(BFloat16, NamedValues) {
  EXPECT_EQ(bfloat16(1.0f).bits, 0x3f80);
  EXPECT_EQ(bfloat16(bits_float(0x3f808000u)).bits, 0x3f80);  // a tie, to even
  EXPECT_EQ(bfloat16(bits_float(0x3f818000u)).bits, 0x3f82);
  EXPECT_EQ(bfloat16(std::numeric_limits<float>::max()).bits, 0x7f80);
  // A NaN whose payload is in the lower half only must not become infinity.
  EXPECT_TRUE(std::isnan(static_cast<float>(bfloat16(bits_float(0x7f800001u)))));
  EXPECT_EQ(float_bits(bfloat16(-0.0f)), 0x80000000u);
}

TEST(DTypeNames, RoundTrip) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    EXPECT_EQ(kvzap::dtype_from_name(kvzap::name_of(dtype)), dtype);
  }
  EXPECT_EQ(kvzap::size_of(DType::f32), sizeof(float));
  EXPECT_EQ(kvzap::size_of(DType::f16), sizeof(half));
  EXPECT_EQ(kvzap::size_of(DType::bf16), sizeof(bfloat16));
  kvzap::test::expect_error([] { kvzap::dtype_from_name("F32"); }, {"F32", "f32", "f16", "bf16"});
}

}  // namespace
