// Python's formats of strings: "%s" % value and "{}".format(value).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "files/quote.hpp"
#include "jinja/printing.hpp"
#include "jinja/string_methods.hpp"
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

/// Reads a format.
struct Reader {
  std::string_view text;
  std::size_t place = 0;

  /// Skips one of the characters. Returns it, or '\0'.
  char skip(std::string_view characters) {
    const bool skips = place < text.size() && characters.find(text[place]) != characters.npos;
    return skips ? text[place++] : '\0';
  }
  int number() {
    int number = 0;
    while (const char digit = skip("0123456789")) {
      number = number * 10 + (digit - '0');
      if (number > most_width) throw Failure("a format is too wide");
    }
    return number;
  }
};

std::string padded(const Conversion& conversion, char otherwise, std::string_view sign,
                   std::string_view body) {
  const std::int64_t missing =
      std::max<std::int64_t>(conversion.width - length_of(sign) - length_of(body), 0);
  const char align = conversion.align == '\0' ? otherwise : conversion.align;
  const std::int64_t after = align == '<' ? missing : align == '^' ? missing - missing / 2 : 0;
  std::string result(align == '=' ? sign : "");
  for (std::int64_t i = after; i < missing; ++i) result += conversion.fill;
  result.append(align == '=' ? "" : sign).append(body);
  for (std::int64_t i = 0; i < after; ++i) result += conversion.fill;
  return result;
}

/// Returns a number's text from its digits.
std::string number_text(const Conversion& conversion, bool is_negative, std::string_view prefix,
                        std::string digits) {
  if (conversion.has_commas) {
    const std::size_t end = std::min(digits.find_first_not_of("0123456789"), digits.size());
    for (std::size_t place = end; place > 3;) digits.insert(place -= 3, ",");
  }
  std::string sign = is_negative ? "-" : "";
  if (!is_negative && conversion.sign != '-') sign += conversion.sign;
  return padded(conversion, '>', sign.append(prefix), digits);
}

std::string integer_text(const Conversion& conversion, std::int64_t value) {
  const bool is_decimal = std::string_view("xXob").find(conversion.type) == std::string_view::npos;
  const char type = is_decimal ? 'd' : conversion.type;
  const auto bits = static_cast<std::uint64_t>(value);
  std::string digits =
      fmt::format(fmt::runtime(fmt::format("{{:{}}}", type)), value < 0 ? 0 - bits : bits);
  if (conversion.precision > static_cast<int>(digits.size())) {
    digits.insert(0, static_cast<std::size_t>(conversion.precision) - digits.size(), '0');
  }
  const bool has_prefix = conversion.alternate && !is_decimal;
  return number_text(conversion, value < 0, has_prefix ? std::string{'0', type} : "", digits);
}

std::string float_text_of(const Conversion& conversion, double value) {
  const bool is_percent = conversion.type == '%';
  const std::string format =
      fmt::format("{{:.{}{}}}", conversion.precision < 0 ? 6 : conversion.precision,
                  is_percent ? 'f' : conversion.type);
  std::string digits =
      fmt::format(fmt::runtime(format), std::abs(is_percent ? value * 100 : value));
  if (is_percent) digits += '%';
  return number_text(conversion, std::signbit(value) && !std::isnan(value), "", digits);
}

/// Formats a number, if the conversion's type is one of `integer_types` or of a float.
std::optional<std::string> formatted_number(const Conversion& conversion, const Value& value,
                                            std::string_view integer_types) {
  const auto is_one_of = [&](std::string_view types) {
    return types.find(conversion.type) != types.npos;
  };
  if (const auto integer = as_integer(value); integer && is_one_of(integer_types)) {
    return integer_text(conversion, *integer);
  }
  const auto number = as_float(value);
  if (number && is_one_of("fFeEgG%")) return float_text_of(conversion, *number);
  return std::nullopt;
}

/// Returns str(value), or repr(value).
std::string text_of(const Value& value, bool quotes, Meter& meter) {
  std::string text;
  quotes ? append_quoted(text, value, meter) : append_text(text, value, meter);
  return text;
}

// ---- By % ---------------------------------------------------------------------------------------

/// Reads a conversion after its %.
Conversion percent_conversion(Reader& format) {
  Conversion result;
  bool has_zeros = false;
  while (const char flag = format.skip("-+ 0#")) {
    if (flag == '-') result.align = '<';
    if (flag == '+' || (flag == ' ' && result.sign == '-')) result.sign = flag;
    has_zeros |= flag == '0';
    result.alternate |= flag == '#';
  }
  result.width = format.number();
  if (format.skip(".")) result.precision = format.number();
  if (format.place >= format.text.size()) throw Failure("a format ends within a conversion");
  result.type = format.text[format.place++];
  if (has_zeros && result.align == '\0') {
    result.align = '=';
    result.fill = "0";
  }
  return result;
}

std::string percent_text(Conversion conversion, const Value& value, bool escapes, Meter& meter) {
  const char type = conversion.type;
  if (type == 's' || type == 'r' || type == 'a') {
    std::string text = text_of(value, type != 's', meter);
    if (escapes && (type != 's' || !is_safe(value))) text = escaped(text);
    if (conversion.precision >= 0) text.resize(offset_of(text, conversion.precision));
    if (conversion.align == '=') {
      conversion.align = '>';
      conversion.fill = " ";
    }
    return padded(conversion, '>', "", text);
  }
  Value number = value;
  const bool is_decimal = type == 'd' || type == 'i' || type == 'u';
  if (is_decimal && value.floating() && std::abs(*value.floating()) < 9e18) {
    number = static_cast<std::int64_t>(*value.floating());
  }
  if (auto text = formatted_number(conversion, number, "diuxXo")) return *text;
  throw Failure(fmt::format("format %{} does not fit a value of type {}",
                            files::shown(std::string(1, type)), value.type_name()));
}

// ---- By braces ----------------------------------------------------------------------------------

/// Reads a format specification.
Conversion brace_conversion(std::string_view style) {
  constexpr std::string_view aligns = "<>^=";
  Conversion result;
  Reader reader{style};
  const std::size_t fill = style.empty() ? 0 : character_at(style, 0).second;
  if (fill < style.size() && aligns.find(style[fill]) != aligns.npos) {
    result.fill = std::string(style.substr(0, fill));
    reader.place = fill;
  }
  result.align = reader.skip(aligns);
  if (const char sign = reader.skip("+- ")) result.sign = sign;
  result.alternate = reader.skip("#") != '\0';
  if (result.align == '\0' && style.substr(reader.place, 1) == "0") {
    result.align = '=';
    result.fill = "0";
  }
  result.width = reader.number();
  result.has_commas = reader.skip(",") != '\0';
  if (reader.skip(".")) result.precision = reader.number();
  if (reader.place < style.size()) result.type = style[reader.place++];
  if (reader.place < style.size()) throw Failure("an unknown format of a value");
  return result;
}

std::string brace_text(const Value& value, std::string_view style, Meter& meter) {
  if (style.empty()) return text_of(value, false, meter);
  const Conversion conversion = brace_conversion(style);
  const bool is_text = conversion.type == 's' || conversion.type == '\0';
  if (value.is_string() && is_text && conversion.align != '=') {
    std::string text = value.text()->bytes;
    if (conversion.precision >= 0) text.resize(offset_of(text, conversion.precision));
    return padded(conversion, '<', "", text);
  }
  constexpr std::string_view integer_types("\0dxXob", 6);
  if (auto text = formatted_number(conversion, value, integer_types)) return *text;
  throw Failure(fmt::format("format {} does not fit a value of type {}", files::in_quotes(style),
                            value.type_name()));
}

/// Finds the values of fields.
class Fields {
 public:
  explicit Fields(const Arguments& arguments) : m_arguments(arguments) {}

  const Value& operator[](std::string_view name) {
    Reader reader{name};
    const auto number = static_cast<std::size_t>(reader.number());
    const bool is_number = reader.place > 0;
    m_is_numbered |= is_number;
    const std::size_t index = name.empty() ? m_next++ : number;
    if (m_next > 0 && m_is_numbered) throw Failure("a format has fields with and without numbers");
    if (name.empty() || (is_number && reader.place == name.size())) {
      if (index >= m_arguments.positional.size()) throw Failure("a format has too few values");
      return m_arguments.positional[index];
    }
    for (const auto& [other, value] : m_arguments.named) {
      if (other == name) return value;
    }
    throw Failure(fmt::format("a format has no value {}", files::in_quotes(name)));
  }

 private:
  const Arguments& m_arguments;
  std::size_t m_next = 0;
  bool m_is_numbered = false;
};

/// Formats a field "name!conversion:style".
std::string field_text(std::string_view field, Fields& fields, bool escapes, Meter& meter) {
  const std::size_t colon = std::min(field.find(':'), field.size());
  std::string_view name = field.substr(0, colon);
  const std::string_view style = field.substr(std::min(colon + 1, field.size()));
  char conversion = '\0';
  if (name.size() >= 2 && name[name.size() - 2] == '!') {
    conversion = name.back();
    name.remove_suffix(2);
  }
  const Value& value = fields[name];
  if (conversion == '\0') {
    if (!escapes || !is_safe(value)) {
      const std::string text = brace_text(value, style, meter);
      return escapes ? escaped(text) : text;
    }
    if (!style.empty()) throw Failure("a format of a safe string has no specification");
    return value.text()->bytes;
  }
  if (conversion != 's' && conversion != 'r') throw Failure("an unknown conversion in a format");
  const std::string text =
      brace_text(Value(text_of(value, conversion == 'r', meter)), style, meter);
  return escapes ? escaped(text) : text;
}

}  // namespace

std::string percent_formatted(Evaluator& evaluator, std::string_view format, const Value& value,
                              bool escapes) {
  Meter& meter = evaluator.meter();
  meter.allocate(format.size());
  const bool is_tuple = value.sequence() && value.sequence()->is_tuple();
  const std::vector<Value> values = is_tuple ? value.sequence()->values : std::vector<Value>{value};
  std::size_t used = 0;
  std::string result;
  Reader reader{format};
  while (reader.place < format.size()) {
    const std::size_t next = std::min(format.find('%', reader.place), format.size());
    result += format.substr(reader.place, next - reader.place);
    reader.place = next + 1;
    if (next == format.size()) break;
    const Value* found = nullptr;
    if (reader.skip("(")) {
      const std::size_t end = std::min(format.find(')', reader.place), format.size());
      const std::string_view name = format.substr(reader.place, end - reader.place);
      if (value.dict()) found = find(*value.dict(), name, meter);
      if (found == nullptr) throw Failure("a format needs a value that the dict lacks");
      reader.place = end + 1;
    }
    const Conversion conversion = percent_conversion(reader);
    if (conversion.type == '%') {
      result += '%';
      continue;
    }
    if (found == nullptr) {
      if (used == values.size()) throw Failure("there are fewer values than the format needs");
      found = &values[used++];
    }
    const std::string piece = percent_text(conversion, *found, escapes, meter);
    meter.allocate(piece.size());
    result += piece;
  }
  if (used < values.size() && !value.dict()) throw Failure("not all values of a format are used");
  return result;
}

std::string brace_formatted(Evaluator& evaluator, std::string_view format,
                            const Arguments& arguments, bool escapes) {
  Meter& meter = evaluator.meter();
  meter.allocate(format.size());
  Fields fields(arguments);
  std::string result;
  for (std::size_t i = 0; i < format.size(); ++i) {
    const char c = format[i];
    if (c != '{' && c != '}') {
      result += c;
    } else if (i + 1 < format.size() && format[i + 1] == c) {
      result += c;
      ++i;
    } else {
      const std::size_t end = format.find('}', i);
      if (c == '}' || end == std::string_view::npos) throw Failure("a brace is not closed");
      const std::string piece =
          field_text(format.substr(i + 1, end - i - 1), fields, escapes, meter);
      meter.allocate(piece.size());
      result += piece;
      i = end;
    }
  }
  return result;
}

}  // namespace kvzap::jinja
