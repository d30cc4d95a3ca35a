#include "grammar/json_strings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "grammar/regular_expression.hpp"

namespace kvzap::grammar {
namespace {

constexpr char32_t last_control = 0x1F;
constexpr std::pair<char, char> letter_escapes[] = {
    {'"', '"'}, {'\\', '\\'}, {'\b', 'b'}, {'\f', 'f'}, {'\n', 'n'}, {'\r', 'r'}, {'\t', 't'}};

/// Empty for a character that is spelt as itself.
std::string escaped(char32_t code) {
  for (const auto& [character, letter] : letter_escapes) {
    if (code == static_cast<unsigned char>(character)) return {'\\', letter};
  }
  if (code <= last_control) return fmt::format("\\u{:04x}", static_cast<unsigned>(code));
  return {};
}

Expr hexadecimal_digit(std::string_view digits) {
  ByteSet bytes;
  for (const char digit : digits) {
    bytes.set(static_cast<unsigned char>(digit));
    if (digit >= 'A') bytes.set(static_cast<unsigned char>(digit | 0x20));
  }
  return one_byte(bytes);
}

// Parts of formats. Days are those of the calendar, without leap seconds.
constexpr const char* date_pattern =
    // A day that all years have.
    "(?:(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])-"
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    // A leap year's last of February.
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)";
constexpr const char* time_pattern =
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
constexpr const char* byte_pattern = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
constexpr const char* label_pattern = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?";

std::string ipv4() { return fmt::format("{0}(?:\\.{0}){{3}}", byte_pattern); }

std::string ipv6() {
  const std::string group = "[0-9a-fA-F]{1,4}";
  // All groups, or some on each side of "::"; the last two may be an IPv4 address.
  std::string all = fmt::format("(?:{0}:){{7}}{0}|(?:{0}:){{6}}{1}", group, ipv4());
  for (int before = 0; before <= 7; ++before) {
    const int after = 7 - before;
    const std::string left =
        before == 0 ? "" : fmt::format("{0}(?::{0}){{{1}}}", group, before - 1);
    std::string right;
    if (after > 0) right = fmt::format("(?:{0}(?::{0}){{0,{1}}})?", group, after - 1);
    all += fmt::format("|{}::{}", left, right);
    if (after >= 2) all += fmt::format("|{}::(?:{}:){{0,{}}}{}", left, group, after - 2, ipv4());
  }
  return "(?:" + all + ")";
}

/// RFC 3986, of hosts names and addresses only.
std::string uri() {
  const std::string free = "[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2}";
  const std::string host =
      fmt::format("(?:\\[{}\\]|(?:[A-Za-z0-9._~-]|%[0-9A-Fa-f]{{2}})*)", ipv6());
  const std::string authority =
      fmt::format("(?:(?:[A-Za-z0-9._~-]|%[0-9A-Fa-f]{{2}})*@)?{}(?::[0-9]{{0,5}})?", host);
  const std::string path =
      fmt::format("(?://{1}(?:/(?:{0})*)*|/?(?:(?:{0})+(?:/(?:{0})*)*)?)", free, authority);
  return fmt::format("[A-Za-z][A-Za-z0-9+.-]*:{1}(?:\\?(?:{0}|[/?])*)?(?:#(?:{0}|[/?])*)?", free,
                     path);
}

std::string duration() {
  const std::string day_time = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)";
  return fmt::format(
      "P(?:[0-9]+W|(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)(?:{0})?|{0})",
      day_time);
}

/// Empty if `name` is no format that restricts strings.
std::string format_pattern(std::string_view name) {
  if (name == "date") return date_pattern;
  if (name == "time") return time_pattern;
  if (name == "date-time") return fmt::format("{}T{}", date_pattern, time_pattern);
  if (name == "duration") return duration();
  if (name == "uuid") return "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}";
  if (name == "ipv4") return ipv4();
  if (name == "ipv6") return ipv6();
  if (name == "hostname") return fmt::format("{0}(?:\\.{0})*", label_pattern);
  if (name == "email") {
    const char* word = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+";
    return fmt::format("{0}(?:\\.{0})*@{1}(?:\\.{1})*", word, label_pattern);
  }
  if (name == "uri") return uri();
  return {};
}

}  // namespace

Expr json_character(const std::vector<CodePoints>& ranges) {
  std::vector<CodePoints> raw, escapes = {{0, last_control}, {'"', '"'}, {'\\', '\\'}};
  std::vector<Expr> choices;
  const auto allowed = complement(complement(ranges));  // sorted, without overlap
  for (const auto& [first, last] : allowed) {
    for (const auto& [from, to] : escapes) {
      for (char32_t code = std::max(first, from); code <= std::min(last, to); ++code) {
        choices.push_back(literal(escaped(code)));
      }
    }
    char32_t next = first;
    for (const auto& [from, to] : escapes) {
      if (from > last || to < next) continue;
      if (from > next) raw.emplace_back(next, from - 1);
      next = to + 1;
    }
    if (next <= last) raw.emplace_back(next, last);
  }
  if (!raw.empty()) choices.push_back(code_point(raw));
  return choices.empty() ? nothing() : choice(std::move(choices));
}

Expr any_json_character() {
  const Expr hex = hexadecimal_digit("0123456789ABCDEF");
  const auto code = [&](std::string_view first, std::string_view second) {
    return sequence(
        {literal("\\u"), hexadecimal_digit(first), hexadecimal_digit(second), hex, hex});
  };
  return choice({
      code_point(complement({{0, last_control}, {'"', '"'}, {'\\', '\\'}})),
      sequence({literal("\\"), choice({literal("\""), literal("\\"), literal("/"), literal("b"),
                                       literal("f"), literal("n"), literal("r"), literal("t")})}),
      code("0123456789ABCEF", "0123456789ABCDEF"),
      code("D", "01234567"),
      sequence({code("D", "89AB"), code("D", "CDEF")}),
  });
}

std::string json_string(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    const std::string escape = escaped(static_cast<unsigned char>(c));
    if (escape.empty()) {
      result += c;
    } else {
      result += escape;
    }
  }
  return result + '"';
}

Expr quoted(Expr content) { return sequence({literal("\""), std::move(content), literal("\"")}); }

Expr json_format(std::string_view name) {
  const std::string pattern = format_pattern(name);
  return pattern.empty() ? nullptr : read_regular_expression(pattern, json_character);
}

}  // namespace kvzap::grammar
