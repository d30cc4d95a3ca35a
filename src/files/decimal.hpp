// Parsing of decimal numbers. Unlike strtod and streams, it does not depend on the locale of the
// process: a host application may have set one in which a comma separates decimals.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <system_error>

namespace kvzap::files {

enum class DecimalFault { none, syntax, range };

/// Reads a whole number of type T: digits after at most one sign. Leading zeros have no meaning
/// (010 is ten, not eight). Unlike strtoll, it accepts no text before or after, refuses an empty
/// text, and reports values that T cannot hold as out of range.
template <class T>
DecimalFault read_whole(std::string_view text, T& number) {
  if (!text.empty() && text.front() == '+') {
    text.remove_prefix(1);
    if (!text.empty() && text.front() == '-') return DecimalFault::syntax;
  }
  const std::string_view digits = text.substr(!text.empty() && text.front() == '-' ? 1 : 0);
  if (digits.empty() || digits.find_first_not_of("0123456789") != std::string_view::npos) {
    return DecimalFault::syntax;
  }
  const auto [used, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && used == text.data() + text.size() ? DecimalFault::none
                                                                   : DecimalFault::range;
}

/// Returns whether a decimal number that no double can hold is too large, not too small.
inline bool is_too_large(std::string_view number) {
  const std::size_t end = std::min(number.find_first_of("eE"), number.size());
  const std::size_t point = std::min(number.find('.'), end);
  const std::size_t first = std::min(number.find_first_not_of("0."), end);
  std::string_view exponent = number.substr(std::min(end + 1, number.size()));
  if (!exponent.empty() && exponent.front() == '+') exponent.remove_prefix(1);
  std::int64_t power = 0;
  if (std::from_chars(exponent.data(), exponent.data() + exponent.size(), power).ec ==
      std::errc::result_out_of_range) {
    return exponent.front() != '-';
  }
  // Beyond any text's length, and the sum below cannot overflow.
  constexpr std::int64_t far = std::int64_t{1} << 62;
  if (power > far || power < -far) return power > 0;
  return power + static_cast<std::int64_t>(point) > static_cast<std::int64_t>(first);
}

/// Reads the number at the start of `text`: a sign or none, then digits such as 3, 0.5, .5, 5. or
/// 1e-6, or inf, infinity or nan. Returns its length; 0 if there is none. A number too large for a
/// double becomes infinite, one too small becomes 0, as with strtod in the locale "C". There are no
/// hexadecimal digits and no white space.
inline std::size_t read_leading_real(std::string_view text, double& number) {
  const bool is_negative = !text.empty() && text.front() == '-';
  const std::size_t sign = is_negative || (!text.empty() && text.front() == '+') ? 1 : 0;
  const std::string_view size = text.substr(sign);
  double value = 0;
  std::size_t length = 0;
  for (const std::string_view name : {"infinity", "inf", "nan"}) {
    if (size.substr(0, name.size()) != name) continue;
    value = name == "nan" ? std::numeric_limits<double>::quiet_NaN()
                          : std::numeric_limits<double>::infinity();
    length = name.size();
    break;
  }
  // from_chars has names and signs of its own.
  if (length == 0 && !size.empty() &&
      std::string_view(".0123456789").find(size.front()) != std::string_view::npos) {
    const auto [end, error] = std::from_chars(size.data(), size.data() + size.size(), value);
    length = static_cast<std::size_t>(end - size.data());
    if (error == std::errc::result_out_of_range) {
      value = is_too_large(size.substr(0, length)) ? std::numeric_limits<double>::infinity() : 0;
    } else if (error != std::errc()) {
      length = 0;
    }
  }
  if (length == 0) return 0;
  number = is_negative ? -value : value;
  return sign + length;
}

/// Reads a number that is the whole text; read_leading_real has its syntax. Reports values that a
/// double cannot hold as out of range.
inline DecimalFault read_real(std::string_view text, double& number) {
  const std::size_t length = read_leading_real(text, number);
  if (length == 0 || length != text.size()) return DecimalFault::syntax;
  const bool is_named = text.find_first_of("0123456789") == std::string_view::npos;
  return is_named || std::isfinite(number) ? DecimalFault::none : DecimalFault::range;
}

/// Returns the shortest decimal number that is this float, as a double: 0.1 rather than
/// 0.10000000149.
inline double decimal_of(float value) {
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  double number = 0;
  std::from_chars(digits.data(), end, number);
  return number;
}

}  // namespace kvzap::files
