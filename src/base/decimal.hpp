// Strict parsing of decimal numbers: the whole text is a number, or it is an error.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

namespace kvzap::base {

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

/// Reads a number such as -3, 0.5, .5, 5. or 1e-6, or inf, -inf or nan. Unlike strtod, it accepts
/// no text before or after and no hexadecimal digits, and reports values that a double cannot hold
/// as out of range.
inline DecimalFault read_real(const std::string& text, double& number) {
  const std::string_view digits = "0123456789";
  std::string_view left = text;
  const auto skip = [&left](std::string_view any_of) {
    const std::size_t count = std::min(left.find_first_not_of(any_of), left.size());
    left.remove_prefix(count);
    return count;
  };
  if (!left.empty() && (left.front() == '-' || left.front() == '+')) left.remove_prefix(1);
  const bool is_named = left == "inf" || left == "nan" || left == "infinity";
  if (!is_named) {
    std::size_t count = skip(digits);
    if (!left.empty() && left.front() == '.') {
      left.remove_prefix(1);
      count += skip(digits);
    }
    if (count == 0) return DecimalFault::syntax;
    if (!left.empty() && (left.front() == 'e' || left.front() == 'E')) {
      left.remove_prefix(1);
      if (!left.empty() && (left.front() == '-' || left.front() == '+')) left.remove_prefix(1);
      if (skip(digits) == 0) return DecimalFault::syntax;
    }
    if (!left.empty()) return DecimalFault::syntax;
  }
  number = std::strtod(text.c_str(), nullptr);
  return is_named || std::isfinite(number) ? DecimalFault::none : DecimalFault::range;
}

}  // namespace kvzap::base
