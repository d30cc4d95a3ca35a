#include "jinja/formatting.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "files/quote.hpp"
#include "jinja/markup.hpp"
#include "jinja/printing.hpp"
#include "jinja/unicode.hpp"

namespace kvzap::jinja {
namespace {

constexpr int most_width = 10000;

/// A conversion, written as %-5.2f or as :<5.2f.
struct Conversion {
  std::string fill = " ";
  char align = '\0';  // < > ^ or =
  char sign = '-';
  bool alternate = false;
  bool has_commas = false;
  int width = 0;
  int precision = -1;
  char type = '\0';
};

std::string padded(const Conversion& conversion, char otherwise, std::string_view sign,
                   std::string_view body) {
  const std::int64_t missing = conversion.width - length_of(sign) - length_of(body);
  const auto fill = [&](std::int64_t count) {
    std::string text;
    for (std::int64_t i = 0; i < count; ++i) text += conversion.fill;
    return text;
  };
  std::string result(sign);
  if (missing <= 0) return result.append(body);
  switch (conversion.align == '\0' ? otherwise : conversion.align) {
    case '<':
      return result.append(body) + fill(missing);
    case '^':
      return fill(missing / 2) + result.append(body) + fill(missing - missing / 2);
    case '=':
      return result + fill(missing).append(body);
    default:
      return fill(missing) + result.append(body);
  }
}

std::string with_commas(std::string digits) {
  const std::size_t end = std::min(digits.find_first_not_of("0123456789"), digits.size());
  for (std::size_t place = end; place > 3;) digits.insert(place -= 3, ",");
  return digits;
}

std::string sign_of(const Conversion& conversion, bool is_negative) {
  return is_negative ? "-" : conversion.sign == '-' ? "" : std::string(1, conversion.sign);
}

std::string integer_text(const Conversion& conversion, std::int64_t value) {
  const std::uint64_t size =
      value < 0 ? 0 - static_cast<std::uint64_t>(value) : static_cast<std::uint64_t>(value);
  std::string digits, prefix;
  switch (conversion.type) {
    case 'x':
      digits = fmt::format("{:x}", size);
      prefix = "0x";
      break;
    case 'X':
      digits = fmt::format("{:X}", size);
      prefix = "0X";
      break;
    case 'o':
      digits = fmt::format("{:o}", size);
      prefix = "0o";
      break;
    case 'b':
      digits = fmt::format("{:b}", size);
      prefix = "0b";
      break;
    default:
      digits = std::to_string(size);
  }
  if (conversion.precision > static_cast<int>(digits.size())) {
    digits.insert(0, static_cast<std::size_t>(conversion.precision) - digits.size(), '0');
  }
  if (conversion.has_commas) digits = with_commas(digits);
  const std::string sign = sign_of(conversion, value < 0) + (conversion.alternate ? prefix : "");
  return padded(conversion, '>', sign, digits);
}

std::string float_text_of(const Conversion& conversion, double value) {
  const char type = conversion.type == '%' ? 'f' : conversion.type;
  const double size = std::abs(type != conversion.type ? value * 100 : value);
  const int precision = conversion.precision < 0 ? 6 : conversion.precision;
  std::string digits;
  if (!std::isfinite(size)) {
    digits = std::isnan(size) ? "nan" : "inf";
  } else {
    digits = fmt::format(fmt::runtime(fmt::format("{{:.{}{}}}", precision, type)), size);
  }
  if (conversion.has_commas) digits = with_commas(digits);
  if (conversion.type == '%') digits += '%';
  return padded(conversion, '>', sign_of(conversion, std::signbit(value) && !std::isnan(value)),
                digits);
}

bool is_float_type(char type) {
  return type == 'f' || type == 'F' || type == 'e' || type == 'E' || type == 'g' || type == 'G';
}

int parsed_number(std::string_view format, std::size_t& place) {
  int number = 0;
  while (place < format.size() && format[place] >= '0' && format[place] <= '9') {
    number = number * 10 + (format[place++] - '0');
    if (number > most_width) throw Failure("a format is too wide");
  }
  return number;
}

/// Formats by %.
class PercentFormatter {
 public:
  PercentFormatter(Evaluator& evaluator, std::string_view format, const Value& value, bool escapes)
      : m_evaluator(evaluator), m_format(format), m_value(value), m_escapes(escapes) {
    const bool is_tuple = value.is(Sequence::Shape::tuple) || value.is(Sequence::Shape::group);
    if (is_tuple) {
      m_values = value.sequence()->values;
    } else {
      m_values = {value};
    }
    m_is_tuple = is_tuple;
  }

  std::string operator()() {
    std::string result;
    while (m_place < m_format.size()) {
      const std::size_t next = std::min(m_format.find('%', m_place), m_format.size());
      result += m_format.substr(m_place, next - m_place);
      m_place = next + 1;
      if (next < m_format.size()) {
        const std::string piece = conversion();
        m_evaluator.meter().allocate(piece.size());
        result += piece;
      }
    }
    const bool may_remain = !m_is_tuple && m_value.dict() != nullptr;
    if (m_next < m_values.size() && !may_remain && !m_is_named) {
      throw Failure("not all values of a format are used");
    }
    return result;
  }

 private:
  char peek() const {
    if (m_place >= m_format.size()) throw Failure("a format ends within a conversion");
    return m_format[m_place];
  }

  Value next_value() {
    if (m_next >= m_values.size()) throw Failure("there are fewer values than the format needs");
    return m_values[m_next++];
  }

  std::string conversion() {
    std::optional<Value> named;
    if (peek() == '(') {
      const std::size_t end = std::min(m_format.find(')', m_place), m_format.size());
      const std::string_view name = m_format.substr(m_place + 1, end - m_place - 1);
      m_place = end + 1;
      const Dict* const dict = m_value.dict();
      const Value* const found = dict ? find(*dict, name, m_evaluator.meter()) : nullptr;
      if (found == nullptr) throw Failure("a format needs a value that the dict lacks");
      named = *found;
      m_is_named = true;
    }
    Conversion conversion;
    bool has_zeros = false;
    for (; std::string_view("-+ 0#").find(peek()) != std::string_view::npos; ++m_place) {
      const char flag = peek();
      if (flag == '-') conversion.align = '<';
      if (flag == '+' || (flag == ' ' && conversion.sign == '-')) conversion.sign = flag;
      if (flag == '0') has_zeros = true;
      if (flag == '#') conversion.alternate = true;
    }
    conversion.width = parsed_number(m_format, m_place);
    if (peek() == '.') {
      ++m_place;
      conversion.precision = parsed_number(m_format, m_place);
    }
    conversion.type = peek();
    ++m_place;
    if (conversion.type == '%') return "%";
    if (has_zeros && conversion.align == '\0') {
      conversion.align = '=';
      conversion.fill = "0";
    }
    return formatted(conversion, named ? *named : next_value());
  }

  std::string formatted(Conversion conversion, const Value& value) {
    const char type = conversion.type;
    if (type == 's' || type == 'r' || type == 'a') {
      std::string text;
      type == 's' ? append_text(text, value, m_evaluator.meter())
                  : append_quoted(text, value, m_evaluator.meter());
      if (m_escapes && (type != 's' || !is_safe(value))) text = escaped(text);
      if (conversion.precision >= 0) text.resize(offset_of(text, conversion.precision));
      if (conversion.align == '=') conversion = {" ", '>', '-', false, false, conversion.width};
      return padded(conversion, '>', "", text);
    }
    if (is_float_type(type)) {
      const auto number = as_float(value);
      if (!number)
        throw Failure(fmt::format("a format needs a number, found {}", value.type_name()));
      return float_text_of(conversion, *number);
    }
    auto integer = as_integer(value);
    if (!integer && value.floating() && std::abs(*value.floating()) < 9e18 &&
        (type == 'd' || type == 'i' || type == 'u')) {
      integer = static_cast<std::int64_t>(*value.floating());
    }
    if (!integer || std::string_view("diuxXo").find(type) == std::string_view::npos) {
      throw Failure(fmt::format("format %{} does not fit a value of type {}",
                                files::shown(std::string(1, type)), value.type_name()));
    }
    return integer_text(conversion, *integer);
  }

  Evaluator& m_evaluator;
  std::string_view m_format;
  const Value& m_value;
  std::vector<Value> m_values;
  bool m_escapes, m_is_tuple = false, m_is_named = false;
  std::size_t m_place = 0, m_next = 0;
};

/// Formats by braces.
class BraceFormatter {
 public:
  BraceFormatter(Evaluator& evaluator, std::string_view format, const Arguments& arguments,
                 bool escapes)
      : m_evaluator(evaluator), m_format(format), m_arguments(arguments), m_escapes(escapes) {}

  std::string operator()() {
    std::string result;
    for (std::size_t i = 0; i < m_format.size(); ++i) {
      const char c = m_format[i];
      if (c != '{' && c != '}') {
        result += c;
      } else if (m_format.substr(i + 1, 1) == std::string_view(&c, 1)) {
        result += c;
        ++i;
      } else {
        const std::size_t end = m_format.find('}', i);
        if (c == '}' || end == std::string_view::npos) throw Failure("a brace is not closed");
        const std::string piece = field(m_format.substr(i + 1, end - i - 1));
        m_evaluator.meter().allocate(piece.size());
        result += piece;
        i = end;
      }
    }
    return result;
  }

 private:
  const Value& value_of(std::string_view name) {
    std::size_t place = 0;
    const bool is_number = !name.empty() && name[0] >= '0' && name[0] <= '9';
    std::size_t index = m_next;
    if (is_number) index = static_cast<std::size_t>(parsed_number(name, place));
    if (name.empty()) ++m_next;
    m_is_numbered |= is_number;
    if (m_next > 0 && m_is_numbered) throw Failure("a format has fields with and without numbers");
    if (name.empty() || (is_number && place == name.size())) {
      if (index >= m_arguments.positional.size()) throw Failure("a format has too few values");
      return m_arguments.positional[index];
    }
    for (const auto& [other, value] : m_arguments.named) {
      if (other == name) return value;
    }
    throw Failure(fmt::format("a format has no value {}", files::in_quotes(name)));
  }

  std::string field(std::string_view text) {
    const std::size_t colon = std::min(text.find(':'), text.size());
    std::string_view name = text.substr(0, colon);
    const std::string_view style = text.substr(std::min(colon + 1, text.size()));
    char conversion = '\0';
    if (name.size() >= 2 && name[name.size() - 2] == '!') {
      conversion = name.back();
      name.remove_suffix(2);
    }
    const Value& value = value_of(name);
    if (conversion == '\0') {
      if (!m_escapes) return formatted(value, style);
      if (!is_safe(value)) return escaped(formatted(value, style));
      if (!style.empty()) throw Failure("a format of a safe string has no specification");
      return value.text()->bytes;
    }
    if (conversion != 's' && conversion != 'r') throw Failure("an unknown conversion in a format");
    std::string plain;
    conversion == 's' ? append_text(plain, value, m_evaluator.meter())
                      : append_quoted(plain, value, m_evaluator.meter());
    const std::string result = formatted(Value(std::move(plain)), style);
    return m_escapes ? escaped(result) : result;
  }

  static Conversion parsed(std::string_view style) {
    Conversion result;
    std::size_t place = 0;
    const auto peek = [&](std::size_t i) { return i < style.size() ? style[i] : '\0'; };
    const auto is_align = [](char c) { return c == '<' || c == '>' || c == '^' || c == '='; };
    const std::size_t fill = style.empty() ? 0 : character_at(style, 0).second;
    if (is_align(peek(fill))) {
      result.fill = std::string(style.substr(0, fill));
      result.align = peek(fill);
      place = fill + 1;
    } else if (is_align(peek(0))) {
      result.align = peek(place++);
    }
    if (peek(place) == '+' || peek(place) == '-' || peek(place) == ' ') {
      result.sign = peek(place++);
    }
    if (peek(place) == '#') {
      result.alternate = true;
      ++place;
    }
    if (peek(place) == '0' && result.align == '\0') {
      result.align = '=';
      result.fill = "0";
    }
    result.width = parsed_number(style, place);
    if (peek(place) == ',') {
      result.has_commas = true;
      ++place;
    }
    if (peek(place) == '.') result.precision = parsed_number(style, ++place);
    if (place < style.size()) result.type = style[place++];
    if (place < style.size()) throw Failure("an unknown format of a value");
    return result;
  }

  std::string formatted(const Value& value, std::string_view style) {
    std::string plain;
    if (style.empty()) {
      append_text(plain, value, m_evaluator.meter());
      return plain;
    }
    const Conversion conversion = parsed(style);
    const char type = conversion.type;
    if (value.is_string() && (type == 's' || type == '\0') && conversion.align != '=') {
      const std::string& text = value.text()->bytes;
      plain = text.substr(
          0, conversion.precision < 0 ? text.size() : offset_of(text, conversion.precision));
      return padded(conversion, '<', "", plain);
    }
    if (const auto integer = as_integer(value);
        integer &&
        (type == '\0' || std::string_view("dxXob").find(type) != std::string_view::npos)) {
      return integer_text(conversion, *integer);
    }
    if (const auto number = as_float(value); number && (is_float_type(type) || type == '%')) {
      return float_text_of(conversion, *number);
    }
    throw Failure(fmt::format("format {} does not fit a value of type {}", files::in_quotes(style),
                              value.type_name()));
  }

  Evaluator& m_evaluator;
  std::string_view m_format;
  const Arguments& m_arguments;
  bool m_escapes;
  std::size_t m_next = 0;
  bool m_is_numbered = false;
};

}  // namespace

std::string percent_formatted(Evaluator& evaluator, std::string_view format, const Value& value,
                              bool escapes) {
  evaluator.meter().allocate(format.size());
  return PercentFormatter(evaluator, format, value, escapes)();
}

std::string brace_formatted(Evaluator& evaluator, std::string_view format,
                            const Arguments& arguments, bool escapes) {
  evaluator.meter().allocate(format.size());
  return BraceFormatter(evaluator, format, arguments, escapes)();
}

}  // namespace kvzap::jinja
