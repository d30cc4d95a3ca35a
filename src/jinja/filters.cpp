// Filters of strings, numbers and single values.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "files/decimal.hpp"
#include "jinja/evaluator.hpp"
#include "jinja/printing.hpp"
#include "jinja/string_methods.hpp"

namespace kvzap::jinja::filters {
namespace {

std::string text_of(Call& c) { return c.evaluator.text_of(c.self); }

/// Returns a string that is safe if the filter's value is.
Value like_self(Call& c, std::string text) {
  return c.evaluator.make_like(c.self, std::move(text));
}

// ---- Strings ------------------------------------------------------------------------------------

template <std::string (*map)(std::string_view)>
Value mapped(Call& c) {
  return like_self(c, map(text_of(c)));
}

std::string same(std::string_view text) { return std::string(text); }

/// Words begin after white space, hyphens and opening brackets.
Value title(Call& c) {
  std::string result;
  bool begins = true;
  const std::string text = text_of(c);
  for (const auto& [character, bytes] : Characters(text)) {
    result += begins ? upper(bytes) : lower(bytes);
    begins = is_space(character) || std::string_view("-({[<").find(bytes) != bytes.npos;
  }
  return c.evaluator.make_text(std::move(result));
}

Value safe(Call& c) { return c.evaluator.make_text(text_of(c), true); }

template <bool always>
Value escape(Call& c) {
  if (!always && is_safe(c.self)) return c.self;
  return c.evaluator.make_text(escaped(text_of(c)), true);
}

Value urlencode(Call& c) {
  constexpr std::string_view plain = "_.-~/";
  if (c.self.dict() || c.self.sequence()) c.fail("expected a string");
  std::string result;
  for (const char byte : text_of(c)) {
    const bool is_plain = digit_value(byte) < 36 || plain.find(byte) != plain.npos;
    result +=
        is_plain ? std::string(1, byte) : fmt::format("%{:02X}", static_cast<unsigned char>(byte));
  }
  return c.evaluator.make_text(std::move(result));
}

Value trim(Call& c) {
  const std::string text = text_of(c);
  const auto characters = c.has(0) ? std::optional(c.text(0)) : std::nullopt;
  return like_self(c, std::string(stripped(text, Ends::both, characters)));
}

Value replace(Call& c) {
  const std::string text = text_of(c), from = c.evaluator.text_of(*c[0]);
  const std::int64_t most = c.has(2) ? c.integer(2) : -1;
  return Value(
      joined(pieces_of(text, from, most, false, c.meter), c.evaluator.text_of(*c[1]), c.meter));
}

Value indent(Call& c) {
  if (!c.self.is_string()) c.fail("expected a string");
  const std::string space = c.indent(0, 4, 10000), text = c.self.text()->bytes + "\n";
  std::string result;
  bool is_first = true;
  for (const std::string_view line : lines_of(text, false, c.meter)) {
    const bool indents = is_first ? c.flag(1) : c.flag(2) || !line.empty();
    c.meter.allocate(line.size() + 1 + (indents ? space.size() : 0));
    result.append(is_first ? "" : "\n").append(indents ? space : "").append(line);
    is_first = false;
  }
  return like_self(c, std::move(result));
}

Value wordcount(Call& c) {
  const std::string text = text_of(c);
  int words = 0;
  bool is_inside = false;
  for (const auto& [character, bytes] : Characters(text)) {
    const bool was_inside = std::exchange(is_inside, is_word(character));
    words += is_inside && !was_inside ? 1 : 0;
  }
  return words;
}

Value format(Call& c) {
  const auto& [positional, named] = c.arguments;
  if (!positional.empty() && !named.empty()) c.fail("values with and without names");
  std::vector<std::pair<Value, Value>> items;
  for (const auto& [name, value] : named)
    c.evaluator.put(items, c.evaluator.make_text(name), value);
  const Value values =
      named.empty() ? c.evaluator.make_tuple(positional) : c.evaluator.make_dict(std::move(items));
  return like_self(c, percent_formatted(c.evaluator, text_of(c), values, is_safe(c.self)));
}

Value center(Call& c) {
  return like_self(c, justified(c, text_of(c), c.integer(0, 80), " ", Ends::both));
}

// ---- Numbers ------------------------------------------------------------------------------------

/// Returns text of a number without white space at its ends and without underscores between digits,
/// or nothing if it has others.
std::optional<std::string> plain_digits(std::string_view text) {
  text = stripped(text);
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto is_digit_at = [&](std::size_t place) {
      return place < text.size() && digit_value(text[place]) < 10;
    };
    if (text[i] != '_') {
      result += text[i];
    } else if (!is_digit_at(i - 1) || !is_digit_at(i + 1)) {
      return std::nullopt;
    }
  }
  if (result.empty()) return std::nullopt;
  return result;
}

/// Python's float(text).
std::optional<double> parsed_float(std::string_view text) {
  const std::string name = lower(plain_digits(text).value_or(""));
  double value = 0;
  const std::size_t length = files::read_leading_real(name, value);
  return length > 0 && length == name.size() ? std::optional(value) : std::nullopt;
}

/// Python's int(text, base).
std::optional<std::int64_t> parsed_integer(std::string_view text, std::int64_t base) {
  std::string plain = plain_digits(text).value_or("");
  if (base < 2 || base > 36) return std::nullopt;
  const bool is_negative = plain[0] == '-';
  if (is_negative || plain[0] == '+') plain.erase(0, 1);
  const std::string prefix = lower(plain.substr(0, 2));
  const int prefix_base = prefix == "0x" ? 16 : prefix == "0o" ? 8 : prefix == "0b" ? 2 : 0;
  if (base == prefix_base) plain.erase(0, 2);
  if (plain[0] == '-') return std::nullopt;
  if (is_negative) plain.insert(0, "-");
  std::int64_t result = 0;
  const char* const last = plain.data() + plain.size();
  const auto [end, error] = std::from_chars(plain.data(), last, result, static_cast<int>(base));
  if (end != last || error == std::errc::invalid_argument) return std::nullopt;
  if (error != std::errc()) throw Failure("an integer exceeds 64 bits");
  return result;
}

Value truncated(double value) {
  if (std::isinf(value) || std::abs(value) >= 9.2e18) throw Failure("an integer exceeds 64 bits");
  return static_cast<std::int64_t>(value);
}

Value integer(Call& c) {
  const Value otherwise = c[0] ? *c[0] : Value(0);
  if (const auto number = as_integer(c.self)) return *number;
  if (const double* const number = c.self.floating()) {
    return std::isnan(*number) ? otherwise : truncated(*number);
  }
  if (c.self.is_undefined()) c.fail("the value is undefined");
  if (!c.self.is_string()) return otherwise;
  const std::string_view text = c.self.text()->bytes;
  c.meter.step(static_cast<std::int64_t>(text.size() / 16));
  if (const auto number = parsed_integer(text, c.integer(1, 10))) return *number;
  const auto number = parsed_float(text);
  return number && std::isfinite(*number) ? truncated(*number) : otherwise;
}

Value floating(Call& c) {
  if (c.self.is_undefined()) c.fail("the value is undefined");
  auto number = as_float(c.self);
  if (const Text* const text = c.self.text()) {
    c.meter.step(text->length / 16);
    number = parsed_float(text->bytes);
  }
  return number ? Value(*number) : c[0] ? *c[0] : Value(0.0);
}

Value absolute(Call& c) {
  if (const double* const number = c.self.floating()) return std::abs(*number);
  const auto number = as_integer(c.self);
  if (!number || *number == INT64_MIN) c.fail("expected a number");
  return std::abs(*number);
}

Value round(Call& c) {
  const std::int64_t precision = c.integer(0);
  const std::string_view method = c.text(1, "common");
  const auto number = as_float(c.self);
  if (!number) c.fail("expected a number");
  if (precision < 0 || precision > 300) c.fail("the precision is out of range");
  if (method == "common") {
    if (const auto whole = as_integer(c.self)) return *whole;
    if (!std::isfinite(*number)) return *number;
    double rounded = 0;
    files::read_leading_real(fmt::format("{:.{}f}", *number, precision), rounded);
    return rounded;
  }
  if (method != "ceil" && method != "floor") c.fail("the method must be common, ceil or floor");
  const double scale = std::pow(10.0, static_cast<double>(precision));
  const double scaled = *number * scale;
  if (!std::isfinite(scaled)) c.fail("expected a finite number");
  // Python's integers have no -0.
  return ((method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) + 0.0) / scale;
}

// ---- Values -------------------------------------------------------------------------------------

Value otherwise(Call& c) {
  const bool replaces = c.self.is_undefined() || (c.flag(1) && !is_true(c.self));
  if (!replaces) return c.self;
  return c[0] ? *c[0] : Value(std::string());
}

Value attribute(Call& c) {
  // A dict's keys are no attributes.
  if (c.self.dict()) {
    const Builtin* const method = find_method(c.self, c.text(0));
    return method ? c.evaluator.attribute(c.self, method->name) : Undefined{};
  }
  const Value found = c.evaluator.attribute(c.self, c.text(0));
  return found.is_undefined() ? Undefined{} : found;
}

Value tojson(Call& c) {
  JsonStyle style;
  style.ensure_ascii = c.flag(0);
  style.sort_keys = c.flag(3);
  if (c.has(1)) {
    style.indent = c.indent(1, 0, 1000);
    style.item_separator = ",";
  }
  if (c.has(2)) {
    const std::vector<Value> separators = c.evaluator.elements_of(*c[2]);
    if (separators.size() != 2 || !separators[0].is_string() || !separators[1].is_string()) {
      c.fail("separators must be two strings");
    }
    style.item_separator = separators[0].text()->bytes;
    style.key_separator = separators[1].text()->bytes;
  }
  std::string result;
  append_quoted(result, c.self, c.meter, &style);
  return Value(std::move(result));
}

constexpr Builtin table[] = {
    {"upper", mapped<upper>},
    {"lower", mapped<lower>},
    {"capitalize", mapped<capitalized>},
    {"title", title},
    {"string", mapped<same>},
    {"safe", safe},
    {"escape", escape<false>},
    {"e", escape<false>},
    {"forceescape", escape<true>},
    {"urlencode", urlencode},
    {"trim", trim, 0, {"chars"}},
    {"replace", replace, 2, {"old", "new", "count"}},
    {"indent", indent, 0, {"width", "first", "blank"}},
    {"wordcount", wordcount},
    {"format", format, 0, {"*"}},
    {"center", center, 0, {"width"}},
    {"int", integer, 0, {"default", "base"}},
    {"float", floating, 0, {"default"}},
    {"abs", absolute},
    {"round", round, 0, {"precision", "method"}},
    {"default", otherwise, 0, {"default_value", "boolean"}},
    {"d", otherwise, 0, {"default_value", "boolean"}},
    {"attr", attribute, 1, {"name"}},
    {"tojson", tojson, 0, {"ensure_ascii", "indent", "separators", "sort_keys"}},
};

}  // namespace
}  // namespace kvzap::jinja::filters

namespace kvzap::jinja {

const Builtin* find_filter(std::string_view name) {
  const Builtin* const found = find_in(filters::table, name);
  return found ? found : find_sequence_filter(name);
}

}  // namespace kvzap::jinja
