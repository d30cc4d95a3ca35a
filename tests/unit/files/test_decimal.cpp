#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <tuple>

#include "files/decimal.hpp"

namespace kvzap::files {
namespace {

template <class T>
DecimalFault fault_of_whole(const std::string& text) {
  T number{};
  return read_whole(text, number);
}

TEST(Decimal, WholeNumbers) {
  std::int64_t number = 0;
  for (const auto& [text, value] : {std::pair<const char*, std::int64_t>("0", 0),
                                    {"-0", 0},
                                    {"010", 10},
                                    {"-010", -10},
                                    {"+7", 7},
                                    {"9223372036854775807", INT64_MAX},
                                    {"-9223372036854775808", INT64_MIN}}) {
    EXPECT_EQ(read_whole(text, number), DecimalFault::none) << text;
    EXPECT_EQ(number, value) << text;
  }
  for (const char* text :
       {"", "-", "+", "+-3", "--3", " 1", "1 ", "1x", "0x1", "1.0", "1e3", "1'000", "1_0"}) {
    EXPECT_EQ(fault_of_whole<std::int64_t>(text), DecimalFault::syntax) << text;
  }
  EXPECT_EQ(fault_of_whole<std::int64_t>(std::string("1\0", 2)), DecimalFault::syntax);
  EXPECT_EQ(fault_of_whole<std::int64_t>("9223372036854775808"), DecimalFault::range);
  EXPECT_EQ(fault_of_whole<std::uint64_t>("18446744073709551615"), DecimalFault::none);
  EXPECT_EQ(fault_of_whole<std::uint64_t>("18446744073709551616"), DecimalFault::range);
  EXPECT_EQ(fault_of_whole<std::uint64_t>("-1"), DecimalFault::range);
}

TEST(Decimal, RealNumbers) {
  double number = 0;
  for (const auto& [text, value] : {std::pair<const char*, double>("0", 0),
                                    {"-4", -4},
                                    {"+.5", 0.5},
                                    {"5.", 5},
                                    {"010", 10},
                                    {"1e-6", 1e-6},
                                    {"2.5E+1", 25},
                                    {"1e-999", 0}}) {
    EXPECT_EQ(read_real(text, number), DecimalFault::none) << text;
    EXPECT_EQ(number, value) << text;
  }
  EXPECT_EQ(read_real("-inf", number), DecimalFault::none);
  EXPECT_EQ(number, -std::numeric_limits<double>::infinity());
  EXPECT_EQ(read_real("nan", number), DecimalFault::none);
  for (const char* text :
       {"", ".", "-", "e3", "1e", "1e+", " 1", "1 ", "0x1p3", "1.2.3", "infinit", "1,5"}) {
    EXPECT_EQ(read_real(text, number), DecimalFault::syntax) << text;
  }
  EXPECT_EQ(read_real(std::string("1\0", 2), number), DecimalFault::syntax);
  EXPECT_EQ(read_real("1e999", number), DecimalFault::range);
  EXPECT_EQ(read_real("-1e999", number), DecimalFault::range);
}

// As strtod in the locale "C", but for hexadecimal digits and white space.
TEST(Decimal, RealNumbersAtTheStart) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  for (const auto& [text, length, value] :
       {std::tuple<const char*, std::size_t, double>("1.5GiB", 3, 1.5),
        {"512E", 3, 512},
        {"0x10", 1, 0},
        {"3,5", 1, 3},
        {"-infinity1", 9, -infinity},
        {"4.9e-324x", 8, 4.9406564584124654e-324},
        {"1.8e308", 7, infinity},
        {"-0.0000001e400", 14, -infinity},
        {"0.0e99999", 9, 0},
        {"1e99999999999999999999", 22, infinity},
        {"1e9223372036854775807", 21, infinity},  // the exponent and the digits overflow together
        {"-1e9223372036854775807", 22, -infinity},
        {"1e-9223372036854775808", 22, 0},
        {"1e-99999999999999999999", 23, 0}}) {
    double number = 7;
    EXPECT_EQ(read_leading_real(text, number), length) << text;
    EXPECT_EQ(number, value) << text;
  }
  double number = 7;
  for (const char* text : {"", ".", "-", "+-3", "-+3", "e5", " 1", "INF", "x"}) {
    EXPECT_EQ(read_leading_real(text, number), 0u) << text;
  }
  EXPECT_EQ(number, 7);
  EXPECT_EQ(read_leading_real("0." + std::string(400, '0') + "1", number), 403u);
  EXPECT_EQ(number, 0);
  EXPECT_EQ(read_leading_real(std::string(400, '1'), number), 400u);
  EXPECT_EQ(number, infinity);
}

}  // namespace
}  // namespace kvzap::files
