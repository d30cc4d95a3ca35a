#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "files/parsed_json.hpp"
#include "grammar/number_ranges.hpp"
#include "grammar/regular_match.hpp"

namespace {

using namespace kvzap::grammar;
using Json = nlohmann::ordered_json;

Json parsed(std::string_view text) { return kvzap::files::parse_ordered_json(text, "the schema"); }

TEST(NumberRanges, DecimalsAreExact) {
  const std::pair<const char*, const char*> cases[] = {
      {"0", "0"},
      {"-0.0", "0"},
      {"12", "12"},
      {"-1.50", "-1.5"},
      {"1e3", "1000"},
      {"1.25e-3", "0.00125"},
      {"-12.5e1", "-125"},
      {"0.1", "0.1"},
      {"1e22", "10000000000000000000000"},
      {"18446744073709551615", "18446744073709551615"},
      {"-9223372036854775808", "-9223372036854775808"},
      // The double's own digits, not the shortest ones.
      {"1e23", "99999999999999991611392"},
  };
  for (const auto& [text, expected] : cases) {
    EXPECT_EQ(decimal(parsed(text)).text(), expected);
  }
  EXPECT_LT(compare(decimal(-2), decimal(-1.5)), 0);
  EXPECT_GT(compare(decimal(10), decimal(9.75)), 0);
  EXPECT_LT(compare(decimal(1.5), decimal(1.51)), 0);
  EXPECT_EQ(compare(decimal(2), decimal(2.0)), 0);
}

struct ValueLimits {
  NumberLimits texts;
  double least = -HUGE_VAL, most = HUGE_VAL;
  bool above = false, below = false;

  bool hold(double value) const {
    return (above ? value > least : value >= least) && (below ? value < most : value <= most);
  }
};

ValueLimits limits_of(const Json& least, const Json& most, bool above, bool below) {
  ValueLimits result;
  if (!least.is_null()) {
    result.texts.tighten_least({decimal(least), above});
    result.least = least.get<double>();
    result.above = above;
  }
  if (!most.is_null()) {
    result.texts.tighten_most({decimal(most), below});
    result.most = most.get<double>();
    result.below = below;
  }
  return result;
}

TEST(NumberRanges, BoundsAreThoseOfTheValues) {
  std::mt19937 random(11);
  const Json bounds[] = {nullptr, 0, 1, -1, 7, 10, 99, 100, -100, 123, -57, 1.5, -0.25, 0.1, 9.99};
  std::vector<std::string> texts = {"0", "-0", "0.0", "9.990", "9.991", "-0.2501", "0.10", "1.49"};
  for (int value = -130; value <= 130; ++value) texts.push_back(std::to_string(value));
  for (int i = 0; i < 150; ++i) {
    texts.push_back(std::to_string(static_cast<int>(random() % 260) - 130) + "." +
                    std::to_string(random() % 1000));
  }
  for (int round = 0; round < 120; ++round) {
    const bool above = random() % 2 == 0, below = random() % 2 == 0;
    const Json &least = bounds[random() % 15], &most = bounds[random() % 15];
    const ValueLimits limits = limits_of(least, most, above, below);
    const bool bounded = limits.texts.least || limits.texts.most;
    const Expr numbers = number_texts(limits.texts, NumberKind::any);
    const Expr integers = number_texts(limits.texts, NumberKind::integer);
    const Expr fractions = number_texts(limits.texts, NumberKind::fraction);
    for (const auto& text : texts) {
      const double value = std::strtod(text.c_str(), nullptr);
      // Zero is spelt without a sign where its side of a bound matters.
      if (bounded && value == 0 && text[0] == '-') continue;
      if (text == "0.0" && limits.texts.most && limits.most <= 0) continue;
      const bool holds = limits.hold(value), is_integer = std::floor(value) == value;
      const bool has_point = text.find('.') != std::string::npos;
      ASSERT_EQ(matches(numbers, text), holds) << least << most << above << below << " " << text;
      ASSERT_EQ(matches(integers, text), holds && !has_point) << least << most << " " << text;
      ASSERT_EQ(matches(fractions, text), holds && !is_integer) << least << most << " " << text;
    }
  }
}

TEST(NumberRanges, WithoutBoundsHaveExponents) {
  const Expr numbers = number_texts({}, NumberKind::any);
  for (const char* text : {"0", "-0", "1e5", "1.5E-10", "-12.25e+3", "123456789012345678901"}) {
    EXPECT_TRUE(matches(numbers, text)) << text;
  }
  for (const char* text : {"", "-", "01", "1.", ".5", "1e", "+1", "1e1.5", "0x1", "NaN"}) {
    EXPECT_FALSE(matches(numbers, text)) << text;
  }
  EXPECT_FALSE(matches(number_texts({}, NumberKind::integer), "1.0"));
  EXPECT_FALSE(matches(number_texts({}, NumberKind::fraction), "1.00"));
  EXPECT_TRUE(matches(number_texts({}, NumberKind::fraction), "1.010"));
}

TEST(NumberRanges, NoReaderRoundsOutOfBounds) {
  NumberLimits limits;
  limits.tighten_least({decimal(0), true});
  limits.tighten_most({decimal(1e6), true});
  const Expr numbers = number_texts(limits, NumberKind::any);
  EXPECT_TRUE(matches(numbers, "0.00000001"));
  EXPECT_TRUE(matches(numbers, "999999.99999999"));
  EXPECT_FALSE(matches(numbers, "0.0000000000000000001"));
  EXPECT_FALSE(matches(numbers, "999999.99999999999999999"));
}

TEST(NumberRanges, MultiplesAreThoseOfDecimals) {
  const Json values[] = {1, 2, 4, 5, 8, 10, 20, 25, 50, 100, 1000, 0.1, 0.01, 0.5, 0.25, 0.2, 2.5};
  for (const Json& value : values) {
    const Decimal divisor = decimal(value);
    ASSERT_TRUE(has_decimal_multiples(divisor)) << value;
    NumberLimits limits;
    limits.multiples_of = {divisor};
    const Expr numbers = number_texts(limits, NumberKind::any);
    const Expr integers = number_texts(limits, NumberKind::integer);
    const long thousandths = std::lround(value.get<double>() * 1000);
    for (long number = 0; number < 110'000; number += number < 1'200 ? 1 : 377) {
      const std::string text = decimal(static_cast<double>(number) / 1000).text();
      const bool is_multiple = number % thousandths == 0;
      ASSERT_EQ(matches(numbers, text), is_multiple) << value << " " << text;
      ASSERT_EQ(matches(numbers, "-" + text), is_multiple) << value << " " << text;
      ASSERT_EQ(matches(integers, text), is_multiple && number % 1000 == 0) << value << " " << text;
    }
  }
  for (const Json& value : {Json(3), Json(7), Json(0.3), Json(0), Json(-1), Json(1.0 / 3)}) {
    EXPECT_FALSE(has_decimal_multiples(decimal(value))) << value;
  }
}

}  // namespace
