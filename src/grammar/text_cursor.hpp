// A place in a text that is read from its beginning: what readers of notations have in common.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "grammar/regular_expression.hpp"

namespace kvzap::grammar {

class TextCursor {
 protected:
  explicit TextCursor(std::string_view text) : m_text(text) {}
  ~TextCursor() = default;

  /// Throws Error about a place in the text.
  [[noreturn]] virtual void fail_at(std::size_t place, const std::string& message) const = 0;

  bool at_end() const { return m_at == m_text.size(); }
  bool follows(std::string_view text) const { return m_text.substr(m_at, text.size()) == text; }
  bool take(std::string_view text) {
    if (!follows(text)) return false;
    m_at += text.size();
    return true;
  }
  bool digit_follows() const { return !at_end() && m_text[m_at] >= '0' && m_text[m_at] <= '9'; }

  /// Reads the number of a repeat.
  std::int64_t count() {
    const std::size_t start = m_at;
    std::int64_t value = 0;
    for (; digit_follows(); ++m_at) {
      value = value * 10 + (m_text[m_at] - '0');
      if (value > max_repeat_count) {
        fail_at(start, fmt::format("expected counts up to {}", max_repeat_count));
      }
    }
    if (m_at == start) fail_at(m_at, "expected a count");
    return value;
  }

  /// Returns the value of a hexadecimal digit; -1: it is none.
  static int hexadecimal_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    const char lower = static_cast<char>(c | 0x20);
    return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
  }
  /// Reads up to 8 hexadecimal digits. `start`: of the escape that has them.
  char32_t hexadecimal(std::size_t digits, std::size_t start) {
    char32_t value = 0;
    for (std::size_t i = 0; i < digits; ++i, ++m_at) {
      const int digit = at_end() ? -1 : hexadecimal_digit(m_text[m_at]);
      if (digit < 0) fail_at(start, fmt::format("expected {} hexadecimal digits", digits));
      value = value * 16 + static_cast<char32_t>(digit);
    }
    return value;
  }

  std::string_view m_text;
  std::size_t m_at = 0;
};

}  // namespace kvzap::grammar
