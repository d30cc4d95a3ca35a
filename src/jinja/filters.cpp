// Filters of strings, numbers and single values.
#include "jinja/filters.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

#include "files/decimal.hpp"
#include "jinja/formatting.hpp"
#include "jinja/markup.hpp"
#include "jinja/methods.hpp"
#include "jinja/printing.hpp"
#include "jinja/unicode.hpp"

namespace kvzap::jinja::filters {
namespace {

// ---- Strings ------------------------------------------------------------------------------------

template <std::string (*map)(std::string_view), bool stays_safe = true>
Value mapped(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("a filter of strings", arguments, {});
  return make_like(evaluator, stays_safe ? value : Value(), map(evaluator.text_of(value)));
}

std::string same(std::string_view text) { return std::string(text); }

/// Words begin after white space, hyphens and opening brackets.
std::string title_of(std::string_view text) {
  std::string result;
  bool begins = true;
  for (std::size_t place = 0; place < text.size();) {
    const auto [character, length] = character_at(text, place);
    const std::string_view piece = text.substr(place, length);
    result += begins ? upper(piece) : lower(piece);
    begins = is_space(character) || character == '-' || character == '(' || character == '{' ||
             character == '[' || character == '<';
    place += length;
  }
  return result;
}

Value safe(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("safe", arguments, {});
  return evaluator.make_safe(evaluator.text_of(value));
}

template <bool always>
Value escape(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("escape", arguments, {});
  if (!always && is_safe(value)) return value;
  return evaluator.make_safe(escaped(evaluator.text_of(value)));
}

std::string url_encoded(std::string_view text) {
  constexpr std::string_view plain = "_.-~/";
  std::string result;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x80 && (is_letter(byte) || is_digit(byte) || plain.find(c) != plain.npos)) {
      result += c;
    } else {
      result += fmt::format("%{:02X}", byte);
    }
  }
  return result;
}

Value urlencode(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("urlencode", arguments, {});
  if (value.dict() || value.sequence()) throw Failure("urlencode: expected a string");
  return evaluator.make_text(url_encoded(evaluator.text_of(value)));
}

Value trim(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("trim", arguments, {"chars"});
  const std::string text = evaluator.text_of(value);
  const bool has_characters = given[0] && !given[0]->is_none();
  return make_like(
      evaluator, value,
      std::string(stripped(text, Ends::both,
                           has_characters ? std::optional(given.text(0)) : std::nullopt)));
}

Value replace(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("replace", arguments, {"old", "new", "count"}, 2);
  const bool has_count = given[2] && !given[2]->is_none();
  return replaced(evaluator, evaluator.text_of(value), evaluator.text_of(*given[0]),
                  evaluator.text_of(*given[1]), has_count ? given.integer_or(2, -1) : -1);
}

Value indent(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("indent", arguments, {"width", "first", "blank"});
  if (!value.is_string()) throw Failure("indent: expected a string");
  std::string space;
  if (given[0] && given[0]->is_string()) {
    space = given[0]->text()->bytes;
  } else {
    const std::int64_t width = given.integer_or(0, 4);
    if (width > 10000) throw Failure("indent: the width is too large");
    space = std::string(static_cast<std::size_t>(std::max<std::int64_t>(width, 0)), ' ');
  }
  const bool first = given.flag(1), blank = given.flag(2);
  const std::string text = value.text()->bytes + "\n";
  std::string result;
  bool is_first = true;
  for (const std::string_view line : split_lines(text, evaluator.meter())) {
    const bool indents = is_first ? first : blank || !line.empty();
    evaluator.meter().allocate(line.size() + 1 + (indents ? space.size() : 0));
    if (!is_first) result += '\n';
    if (indents) result += space;
    result += line;
    is_first = false;
  }
  return make_like(evaluator, value, std::move(result));
}

Value wordcount(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("wordcount", arguments, {});
  const std::string text = evaluator.text_of(value);
  std::int64_t words = 0;
  bool is_inside = false;
  for (std::size_t place = 0; place < text.size();) {
    const auto [character, length] = character_at(text, place);
    const bool is_inside_now = is_word(character);
    words += is_inside_now && !is_inside ? 1 : 0;
    is_inside = is_inside_now;
    place += length;
  }
  return words;
}

Value format(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  if (!arguments.positional.empty() && !arguments.named.empty()) {
    throw Failure("format: values with and without names");
  }
  std::vector<std::pair<Value, Value>> named;
  for (const auto& [name, argument] : arguments.named) {
    evaluator.put(named, evaluator.make_text(name), argument);
  }
  const Value values = named.empty()
                           ? evaluator.make_sequence(arguments.positional, Sequence::Shape::tuple)
                           : evaluator.make_dict(std::move(named));
  const std::string text = evaluator.text_of(value);
  return make_like(evaluator, value, percent_formatted(evaluator, text, values, is_safe(value)));
}

Value center(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("center", arguments, {"width"});
  Arguments inner;
  inner.positional.push_back(Value(given.integer_or(0, 80)));
  const Value text = evaluator.make_text(evaluator.text_of(value));
  const Value result = find_string_method("center")(evaluator, text, inner);
  return make_like(evaluator, value, result.text()->bytes);
}

// ---- Numbers ------------------------------------------------------------------------------------

/// Returns a string without underscores between digits, or nothing if it has others.
std::optional<std::string> plain_digits(std::string_view text) {
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '_') {
      result += text[i];
    } else if (i == 0 || i + 1 == text.size() ||
               !is_digit(static_cast<unsigned char>(text[i - 1])) ||
               !is_digit(static_cast<unsigned char>(text[i + 1]))) {
      return std::nullopt;
    }
  }
  return result;
}

/// Python's float(text).
std::optional<double> parsed_float(std::string_view text) {
  const auto plain = plain_digits(stripped(text));
  if (!plain || plain->empty()) return std::nullopt;
  const std::string name = lower(*plain);
  double value = 0;
  return files::read_leading_real(name, value) == name.size() ? std::optional<double>(value)
                                                              : std::nullopt;
}

/// Python's int(text, base).
std::optional<std::int64_t> parsed_integer(std::string_view text, std::int64_t base) {
  auto plain = plain_digits(stripped(text));
  if (!plain || plain->empty() || base < 2 || base > 36) return std::nullopt;
  const bool is_negative = plain->front() == '-';
  if (is_negative || plain->front() == '+') plain->erase(0, 1);
  const std::string prefix = lower(plain->substr(0, 2));
  if ((base == 16 && prefix == "0x") || (base == 8 && prefix == "0o") ||
      (base == 2 && prefix == "0b")) {
    plain->erase(0, 2);
  }
  std::int64_t result = 0;
  for (const char c : *plain) {
    const int digit = c >= '0' && c <= '9'                     ? c - '0'
                      : (c | 0x20) >= 'a' && (c | 0x20) <= 'z' ? (c | 0x20) - 'a' + 10
                                                               : 99;
    if (digit >= base) return std::nullopt;
    if (__builtin_mul_overflow(result, base, &result) ||
        __builtin_sub_overflow(result, std::int64_t{digit}, &result)) {
      throw Failure("an integer exceeds 64 bits");
    }
  }
  if (plain->empty()) return std::nullopt;
  if (!is_negative && result == INT64_MIN) throw Failure("an integer exceeds 64 bits");
  return is_negative ? result : -result;
}

std::int64_t truncated(double value) {
  if (std::isinf(value) || std::abs(value) >= 9.2e18) throw Failure("an integer exceeds 64 bits");
  return static_cast<std::int64_t>(value);
}

Value integer(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("int", arguments, {"default", "base"});
  const Value otherwise = given[0] ? *given[0] : Value(std::int64_t{0});
  if (const auto number = as_integer(value)) return *number;
  if (value.floating()) {
    return std::isnan(*value.floating()) ? otherwise : Value(truncated(*value.floating()));
  }
  if (!value.is_string()) {
    if (value.is_undefined()) throw Failure("int: the value is undefined");
    return otherwise;
  }
  const std::string_view text = value.text()->bytes;
  evaluator.meter().step(static_cast<std::int64_t>(text.size() / 16));
  if (const auto number = parsed_integer(text, given.integer_or(1, 10))) return *number;
  const auto number = parsed_float(text);
  if (!number || !std::isfinite(*number)) return otherwise;
  return truncated(*number);
}

Value floating(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("float", arguments, {"default"});
  if (const auto number = as_float(value)) return *number;
  if (value.is_undefined()) throw Failure("float: the value is undefined");
  if (value.text()) evaluator.meter().step(value.text()->length / 16);
  const auto number = value.is_string() ? parsed_float(value.text()->bytes) : std::nullopt;
  return number ? Value(*number) : given[0] ? *given[0] : Value(0.0);
}

Value absolute(Evaluator&, const Value& value, Arguments& arguments) {
  const Parameters given("abs", arguments, {});
  if (const double* const number = value.floating()) return std::abs(*number);
  const auto number = as_integer(value);
  if (!number || *number == INT64_MIN) throw Failure("abs: expected a number");
  return std::abs(*number);
}

Value round(Evaluator&, const Value& value, Arguments& arguments) {
  const Parameters given("round", arguments, {"precision", "method"});
  const std::int64_t precision = given.integer_or(0, 0);
  const std::string_view method = given.text_or(1, "common");
  const auto number = as_float(value);
  if (!number) throw Failure("round: expected a number");
  if (precision < 0 || precision > 300) throw Failure("round: the precision is out of range");
  if (method == "common") {
    if (const auto whole = as_integer(value)) return *whole;
    if (!std::isfinite(*number)) return *number;
    double rounded = 0;
    files::read_leading_real(fmt::format("{:.{}f}", *number, precision), rounded);
    return rounded;
  }
  if (method != "ceil" && method != "floor") {
    throw Failure("round: the method must be common, ceil or floor");
  }
  const double scale = std::pow(10.0, static_cast<double>(precision));
  const double scaled = *number * scale;
  if (!std::isfinite(scaled)) throw Failure("round: expected a finite number");
  // Python's integers have no -0.
  return ((method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) + 0.0) / scale;
}

// ---- Values -------------------------------------------------------------------------------------

Value otherwise(Evaluator&, const Value& value, Arguments& arguments) {
  const Parameters given("default", arguments, {"default_value", "boolean"});
  const bool replaces = value.is_undefined() || (given.flag(1) && !is_true(value));
  if (!replaces) return value;
  return given[0] ? *given[0] : Value(std::string());
}

Value attribute(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("attr", arguments, {"name"}, 1);
  const std::string_view name = given.text(0);
  if (value.dict()) {
    const Function function = find_method(value, name);
    return function ? evaluator.make_method("method", function, value) : Value(Undefined{});
  }
  const Value found = evaluator.attribute(value, name);
  return found.is_undefined() ? Value(Undefined{}) : found;
}

Value tojson(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("tojson", arguments,
                         {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  style.ensure_ascii = given.flag(0);
  if (given[1] && !given[1]->is_none()) {
    constexpr std::int64_t most = 1000;
    const std::int64_t width = given[1]->is_string() ? 0 : given.integer_or(1, 0);
    if (width > most) throw Failure("tojson: the indent is too large");
    style.indent =
        given[1]->is_string()
            ? given[1]->text()->bytes
            : std::string(static_cast<std::size_t>(std::max<std::int64_t>(width, 0)), ' ');
    style.item_separator = ",";
  }
  if (given[2] && !given[2]->is_none()) {
    const std::vector<Value> separators = evaluator.elements_of(*given[2]);
    if (separators.size() != 2 || !separators[0].is_string() || !separators[1].is_string()) {
      throw Failure("tojson: separators must be two strings");
    }
    style.item_separator = separators[0].text()->bytes;
    style.key_separator = separators[1].text()->bytes;
  }
  style.sort_keys = given.flag(3);
  std::string result;
  append_json(result, value, style, evaluator.meter());
  return Value(std::move(result));
}

constexpr std::pair<std::string_view, Function> table[] = {
    {"upper", mapped<upper>},
    {"lower", mapped<lower>},
    {"capitalize", mapped<capitalized>},
    {"title", mapped<title_of, false>},
    {"string", mapped<same>},
    {"safe", safe},
    {"escape", escape<false>},
    {"e", escape<false>},
    {"forceescape", escape<true>},
    {"urlencode", urlencode},
    {"trim", trim},
    {"replace", replace},
    {"indent", indent},
    {"wordcount", wordcount},
    {"format", format},
    {"center", center},
    {"int", integer},
    {"float", floating},
    {"abs", absolute},
    {"round", round},
    {"default", otherwise},
    {"d", otherwise},
    {"attr", attribute},
    {"tojson", tojson},
};

}  // namespace
}  // namespace kvzap::jinja::filters

namespace kvzap::jinja {

Function find_filter(std::string_view name) {
  const Function found = find_in(filters::table, name);
  return found ? found : find_sequence_filter(name);
}

}  // namespace kvzap::jinja
