#include "jinja/lexer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "files/decimal.hpp"
#include "files/quote.hpp"
#include "jinja/unicode.hpp"

namespace kvzap::jinja {
namespace {

/// Returns `text` with \n for \r\n and \r, without a newline at its end.
std::string with_plain_newlines(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text.substr(i, 2) != "\r\n") result += text[i] == '\r' ? '\n' : text[i];
  }
  if (!result.empty() && result.back() == '\n') result.pop_back();
  return result;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : m_text(with_plain_newlines(source)) {}

  std::vector<Token> operator()() {
    for (std::size_t tag = 0; (tag = next_tag()) != std::string::npos;) read_tag(tag);
    add_text(m_text.size());
    add(Kind::end, 0);
    return std::move(m_tokens);
  }

 private:
  using Kind = Token::Kind;

  char at(std::size_t place) const { return place < m_text.size() ? m_text[place] : '\0'; }
  std::string_view rest(std::size_t place) const { return std::string_view(m_text).substr(place); }
  std::string_view rest() const { return rest(m_place); }
  bool sees(std::string_view text) const { return rest().substr(0, text.size()) == text; }

  [[noreturn]] void fail(const std::string& message) const { throw SyntaxFailure(m_line, message); }

  void skip(std::size_t bytes) {
    const std::string_view skipped = rest().substr(0, bytes);
    m_line += static_cast<int>(std::count(skipped.begin(), skipped.end(), '\n'));
    m_place += skipped.size();
  }

  /// Adds a token of the next bytes, which it skips.
  void add(Kind kind, std::size_t bytes, Value number = {}) {
    m_tokens.push_back({kind, m_line, std::string(rest().substr(0, bytes)), std::move(number)});
    skip(bytes);
  }

  /// Returns the bytes of the characters at `place` that have the property.
  std::size_t length_while(bool (*property)(std::int32_t), std::size_t place) const {
    std::size_t length = 0;
    for (const auto& [character, bytes] : Characters(rest(place))) {
      if (!property(character)) break;
      length += bytes.size();
    }
    return length;
  }
  std::size_t spaces(std::size_t place) const { return length_while(is_space, place); }

  std::size_t next_tag() const {
    std::size_t tag = m_text.find('{', m_place);
    while (tag != std::string::npos && at(tag + 1) != '{' && at(tag + 1) != '%' &&
           at(tag + 1) != '#') {
      tag = m_text.find('{', tag + 1);
    }
    return tag;
  }

  void add_text(std::size_t bytes, std::size_t kept = std::string::npos) {
    const std::string_view text = rest().substr(0, std::min(bytes, kept));
    if (!text.empty()) m_tokens.push_back({Kind::text, m_line, std::string(text), {}});
    skip(bytes);
  }

  /// Adds the text before the tag at `tag` without the white space that the tag strips. Returns the
  /// bytes of the tag's braces and sign.
  std::size_t add_text_before(std::size_t tag) {
    const std::string_view text = rest().substr(0, tag - m_place);
    const char sign = at(tag + 2);
    const std::size_t begin = text.rfind('\n') + 1;
    std::size_t kept = text.size();
    if (sign == '-') {
      kept = stripped(text, Ends::right).size();
    } else if (sign != '+' && at(tag + 1) != '{' &&
               (begin > 0 || m_place == 0 || m_text[m_place - 1] == '\n') &&
               stripped(text.substr(begin)).empty()) {
      kept = begin;
    }
    add_text(text.size(), kept);
    return sign == '-' || sign == '+' ? 3 : 2;
  }

  /// Returns the length of the closing `tag` ("%}" or another) at the place with its sign and the
  /// white space that it strips, or 0.
  std::size_t closing(std::string_view tag) const {
    const bool is_output = tag == "}}", has_minus = sees("-"), has_plus = !is_output && sees("+");
    const std::size_t sign = has_minus || has_plus ? 1 : 0;
    if (rest().substr(sign, tag.size()) != tag) return 0;
    const std::size_t end = sign + tag.size();
    if (has_minus) return end + spaces(m_place + end);
    return end + (!is_output && !has_plus && at(m_place + end) == '\n' ? 1 : 0);
  }

  void read_tag(std::size_t tag) {
    const std::size_t begin = add_text_before(tag);
    const char kind = at(tag + 1);
    if (kind == '#') {
      skip(begin);
      return skip_comment();
    }
    if (kind == '%') {
      if (const std::size_t raw = end_of_tag("raw", tag + begin)) return read_raw(raw - tag);
    }
    m_tokens.push_back({Kind::tag, m_line, kind == '{' ? "{{" : "{%", {}});
    skip(begin);
    read_inside(kind == '{' ? "}}" : "%}");
  }

  void skip_comment() {
    if (rest().empty()) return;  // Jinja2 takes this
    while (m_place < m_text.size()) {
      if (const std::size_t end = closing("#}")) return skip(end);
      skip(1);
    }
    fail("a comment is not closed");
  }

  /// Returns where the block tag `name` with its name at `place` closes, or 0 if it is another one.
  std::size_t end_of_tag(std::string_view name, std::size_t place) const {
    place += spaces(place);
    if (rest(place).substr(0, name.size()) != name) return 0;
    place += name.size();
    place += spaces(place);
    const bool has_sign = at(place) == '-' || (name != "raw" && at(place) == '+');
    return rest(place + (has_sign ? 1 : 0)).substr(0, 2) == "%}" ? place : 0;
  }

  void read_raw(std::size_t begin) {
    skip(begin);
    const bool strips = sees("-");
    skip(strips ? 3 : 2);
    if (strips) skip(spaces(m_place));
    if (rest().empty()) return;  // Jinja2 takes this
    for (std::size_t tag = m_place; (tag = m_text.find("{%", tag)) != std::string::npos; ++tag) {
      const bool has_sign = at(tag + 2) == '-' || at(tag + 2) == '+';
      const std::size_t end = end_of_tag("endraw", tag + (has_sign ? 3 : 2));
      if (end == 0) continue;
      add_text_before(tag);
      skip(end - tag);
      return skip(closing("%}"));
    }
    fail("a raw block is not closed");
  }

  void read_inside(std::string_view end) {
    m_open = 0;
    while (m_place < m_text.size()) {
      if (const std::size_t length = m_open > 0 ? 0 : closing(end)) {
        m_tokens.push_back({Kind::tag, m_line, std::string(end), {}});
        return skip(length);
      }
      const char c = m_text[m_place];
      if (const std::size_t length = spaces(m_place)) {
        skip(length);
      } else if (digit_value(c) < 10) {
        read_number();
      } else if (c == '"' || c == '\'') {
        read_string(c);
      } else if (const std::size_t bytes = length_while(is_word, m_place)) {
        add(Kind::name, bytes);
      } else {
        read_symbol();
      }
    }
    add(Kind::end, 0);
  }

  /// Returns the length of digits at `place`, with single underscores between them.
  std::size_t digits(std::size_t place, int base, bool may_begin_with_underscore = false) const {
    std::size_t end = place;
    for (;;) {
      const bool has_underscore = at(end) == '_' && (end > place || may_begin_with_underscore);
      const std::size_t digit = end + (has_underscore ? 1 : 0);
      if (digit_value(at(digit)) >= base) return end - place;
      end = digit + 1;
    }
  }

  /// Returns the length of a number with a point or an exponent, or 0.
  std::size_t float_length() const {
    const std::size_t whole = digits(m_place, 10);
    std::size_t end = m_place + whole;
    if (at(end) == '.' && digits(end + 1, 10) > 0) end += 1 + digits(end + 1, 10);
    if (at(end) == 'e' || at(end) == 'E') {
      const std::size_t power = end + (at(end + 1) == '+' || at(end + 1) == '-' ? 2 : 1);
      if (digits(power, 10) > 0) end = power + digits(power, 10);
    }
    return end > m_place + whole ? end - m_place : 0;
  }

  void read_number() {
    const bool follows_dot = m_place > 0 && m_text[m_place - 1] == '.';
    const std::size_t float_bytes = follows_dot ? 0 : float_length();
    const char letter = at(m_place) == '0' ? static_cast<char>(at(m_place + 1) | 0x20) : '\0';
    int base = letter == 'x' ? 16 : letter == 'o' ? 8 : letter == 'b' ? 2 : 10;
    std::size_t bytes = base == 10 ? 0 : digits(m_place + 2, base, true);
    const std::size_t prefix = bytes > 0 ? 2 : 0;
    if (bytes == 0) {
      base = 10;
      bytes = digits(m_place, at(m_place) == '0' ? 1 : 10);
    }
    std::string plain(rest().substr(prefix, float_bytes > 0 ? float_bytes : bytes));
    plain.erase(std::remove(plain.begin(), plain.end(), '_'), plain.end());
    if (float_bytes > 0) {
      double number = 0;
      files::read_leading_real(plain, number);
      return add(Kind::number, float_bytes, number);
    }
    std::int64_t number = 0;
    if (std::from_chars(plain.data(), plain.data() + plain.size(), number, base).ec !=
        std::errc()) {
      fail("an integer is out of range");
    }
    add(Kind::number, prefix + bytes, number);
  }

  void read_string(char quote) {
    std::string value;
    std::size_t i = m_place + 1;
    for (; i < m_text.size() && m_text[i] != quote; ++i) {
      if (m_text[i] == '\\' && i + 1 < m_text.size()) {
        append_escape(++i, value);
      } else {
        value += m_text[i];
      }
    }
    if (i >= m_text.size()) fail("a string is not closed");
    m_tokens.push_back({Kind::string, m_line, std::move(value), {}});
    skip(i + 1 - m_place);
  }

  /// Appends the character of a Python escape whose backslash is before m_text[i], and moves i to
  /// its last character.
  void append_escape(std::size_t& i, std::string& value) const {
    constexpr std::string_view letters = "abfnrtv\\'\"", values = "\a\b\f\n\r\t\v\\'\"";
    const char c = m_text[i];
    if (const std::size_t found = letters.find(c); found != letters.npos) {
      value += values[found];
      return;
    }
    if (c == '\n') return;  // a continued line
    const bool is_octal = digit_value(c) < 8;
    const std::size_t n_digits = is_octal ? 3 : c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    if (n_digits == 0) {
      // Python escapes a character beyond ASCII before it reads escapes.
      if (c == 'N' || static_cast<unsigned char>(c) >= 0x80) fail("an unknown escape in a string");
      value.append(1, '\\').append(1, c);
      return;
    }
    const int base = is_octal ? 8 : 16;
    const std::size_t begin = is_octal ? i : i + 1;
    std::int64_t character = 0;
    for (i = begin; i < begin + n_digits && digit_value(at(i)) < base; ++i) {
      character = character * base + digit_value(at(i));
    }
    const bool is_complete = is_octal || i == begin + n_digits;
    if (!is_complete || character > 0x10FFFF || (character >= 0xD800 && character < 0xE000)) {
      fail("an escape of no character in a string");
    }
    append_character(value, static_cast<std::int32_t>(character));
    --i;
  }

  void read_symbol() {
    constexpr std::string_view symbols[] = {"//", "**", "==", "!=", ">=", "<=", "+", "-", "/",
                                            "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                            ">",  "<",  "=",  ".",  ":",  "|",  ",", ";"};
    constexpr std::string_view opening = "([{", closings = ")]}";
    const auto found = std::find_if(std::begin(symbols), std::end(symbols),
                                    [&](std::string_view symbol) { return sees(symbol); });
    if (found == std::end(symbols)) {
      fail(fmt::format("unexpected character {}",
                       files::in_quotes(rest().substr(0, character_at(m_text, m_place).second))));
    }
    m_open += opening.find(*found) != opening.npos     ? 1
              : closings.find(*found) != closings.npos ? -1
                                                       : 0;
    add(Kind::symbol, found->size());
  }

  std::string m_text;
  std::size_t m_place = 0;
  int m_line = 1;
  int m_open = 0;  // brackets in the tag
  std::vector<Token> m_tokens;
};

}  // namespace

std::vector<Token> tokens_of(std::string_view source) { return Lexer(source)(); }

}  // namespace kvzap::jinja
