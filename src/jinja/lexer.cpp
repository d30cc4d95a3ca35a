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
    const bool is_pair = text[i] == '\r' && i + 1 < text.size() && text[i + 1] == '\n';
    if (!is_pair) result += text[i] == '\r' ? '\n' : text[i];
  }
  if (!result.empty() && result.back() == '\n') result.pop_back();
  return result;
}

bool is_digit_of(char c, int base) {
  const int value = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : 99;
  return value < base;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : m_text(with_plain_newlines(source)) {}

  std::vector<Token> operator()() {
    while (m_place < m_text.size()) {
      const std::size_t tag = next_tag();
      if (tag == std::string::npos) {
        add_text(rest().size());
        break;
      }
      read_tag(tag);
    }
    m_tokens.push_back({Token::Kind::end, m_line, "", {}});
    return std::move(m_tokens);
  }

 private:
  using Kind = Token::Kind;

  std::string_view rest() const { return std::string_view(m_text).substr(m_place); }
  bool sees(std::string_view text) const { return rest().substr(0, text.size()) == text; }

  [[noreturn]] void fail(const std::string& message) const { throw SyntaxFailure(m_line, message); }

  void skip(std::size_t bytes) {
    const std::string_view skipped = rest().substr(0, bytes);
    m_line += static_cast<int>(std::count(skipped.begin(), skipped.end(), '\n'));
    m_begins_line = !skipped.empty() && skipped.back() == '\n';
    m_place += skipped.size();
  }

  std::size_t spaces(std::size_t place) const {
    const std::size_t begin = place;
    while (place < m_text.size()) {
      const auto [character, length] = character_at(m_text, place);
      if (!is_space(character)) break;
      place += length;
    }
    return place - begin;
  }

  std::size_t next_tag() const {
    std::size_t tag = m_place;
    while ((tag = m_text.find('{', tag)) != std::string::npos) {
      const char kind = tag + 1 < m_text.size() ? m_text[tag + 1] : '\0';
      if (kind == '{' || kind == '%' || kind == '#') return tag;
      ++tag;
    }
    return tag;
  }

  void add_text(std::size_t bytes, std::size_t kept = std::string::npos) {
    const std::string_view text = rest().substr(0, std::min(bytes, kept));
    if (!text.empty()) m_tokens.push_back({Kind::text, m_line, std::string(text), {}});
    skip(bytes);
  }

  /// Returns the length of the text before a tag that is not white space to strip.
  std::size_t kept_before(std::size_t tag, char sign, bool is_output) const {
    const std::string_view text = rest().substr(0, tag - m_place);
    if (sign == '-') return stripped(text, Ends::right).size();
    if (sign == '+' || is_output) return text.size();
    const std::size_t newline = text.rfind('\n');
    const std::size_t begin = newline == std::string_view::npos ? 0 : newline + 1;
    const bool begins_line = begin > 0 || m_begins_line;
    return begins_line && stripped(text.substr(begin)).empty() ? begin : text.size();
  }

  /// Returns the length of the closing `tag` ("%}" or another) at the place with its sign and the
  /// white space that it strips, or 0.
  std::size_t closing(std::string_view tag, bool is_output) const {
    const bool has_minus = sees("-"), has_plus = !is_output && sees("+");
    const std::size_t sign = has_minus || has_plus ? 1 : 0;
    if (rest().substr(sign, tag.size()) != tag) return 0;
    const std::size_t end = sign + tag.size();
    if (has_minus) return end + spaces(m_place + end);
    const bool drops = !is_output && !has_plus && rest().substr(end, 1) == "\n";
    return end + (drops ? 1 : 0);
  }

  void read_tag(std::size_t tag) {
    const char kind = m_text[tag + 1];
    const char next = tag + 2 < m_text.size() ? m_text[tag + 2] : '\0';
    const char sign = next == '-' || next == '+' ? next : '\0';
    const std::size_t begin = 2 + (sign != '\0' ? 1 : 0);
    add_text(tag - m_place, kept_before(tag, sign, kind == '{'));
    if (kind == '#') {
      skip(begin);
      return skip_comment();
    }
    if (kind == '%') {
      if (const std::size_t raw = tag_of("raw", tag, begin)) return read_raw(raw - tag);
    }
    m_tokens.push_back({kind == '{' ? Kind::output_begin : Kind::block_begin, m_line, "", {}});
    skip(begin);
    kind == '{' ? read_inside("}}", true) : read_inside("%}", false);
  }

  void skip_comment() {
    if (rest().empty()) return;  // Jinja2 takes this
    while (m_place < m_text.size()) {
      if (const std::size_t end = closing("#}", false)) return skip(end);
      skip(1);
    }
    fail("a comment is not closed");
  }

  /// Returns where the block tag `name` at `tag` closes, or 0 if it is another one. `begin`: length
  /// of "{%" and the sign.
  std::size_t tag_of(std::string_view name, std::size_t tag, std::size_t begin) const {
    std::size_t place = tag + begin;
    place += spaces(place);
    if (std::string_view(m_text).substr(place, name.size()) != name) return 0;
    place += name.size();
    place += spaces(place);
    const std::string_view end = std::string_view(m_text).substr(place);
    const bool has_sign = end.substr(0, 1) == "-" || (name != "raw" && end.substr(0, 1) == "+");
    return end.substr(has_sign ? 1 : 0, 2) == "%}" ? place : 0;
  }

  void read_raw(std::size_t begin) {
    skip(begin);
    const bool strips = sees("-");
    skip(strips ? 3 : 2);
    if (strips) skip(spaces(m_place));
    if (rest().empty()) return;  // Jinja2 takes this
    for (std::size_t tag = m_place; (tag = m_text.find("{%", tag)) != std::string::npos; ++tag) {
      const char next = tag + 2 < m_text.size() ? m_text[tag + 2] : '\0';
      const char sign = next == '-' || next == '+' ? next : '\0';
      const std::size_t end = tag_of("endraw", tag, sign != '\0' ? 3 : 2);
      if (end == 0) continue;
      add_text(tag - m_place, kept_before(tag, sign, false));
      skip(end - tag);
      return skip(closing("%}", false));
    }
    fail("a raw block is not closed");
  }

  void read_inside(std::string_view end, bool is_output) {
    std::string open;  // brackets
    while (m_place < m_text.size()) {
      if (open.empty()) {
        if (const std::size_t length = closing(end, is_output)) {
          m_tokens.push_back({is_output ? Kind::output_end : Kind::block_end, m_line, "", {}});
          return skip(length);
        }
      }
      if (const std::size_t length = spaces(m_place)) {
        skip(length);
      } else {
        read_token(open);
      }
    }
    m_tokens.push_back({Kind::end, m_line, "", {}});
  }

  void read_token(std::string& open) {
    const char c = m_text[m_place];
    if (c >= '0' && c <= '9') return read_number();
    if (c == '"' || c == '\'') return read_string(c);
    if (const std::size_t length = name_length()) {
      m_tokens.push_back({Kind::name, m_line, std::string(rest().substr(0, length)), {}});
      return skip(length);
    }
    read_symbol(open);
  }

  std::size_t name_length() const {
    std::size_t place = m_place;
    while (place < m_text.size()) {
      const auto [character, length] = character_at(m_text, place);
      if (!is_word(character)) break;
      place += length;
    }
    return place - m_place;
  }

  /// Returns the length of digits at `place`, with single underscores between them.
  std::size_t digits(std::size_t place, int base, bool may_begin_with_underscore = false) const {
    std::size_t end = place;
    while (end < m_text.size()) {
      const bool has_underscore = m_text[end] == '_' && (end > place || may_begin_with_underscore);
      const std::size_t digit = end + (has_underscore ? 1 : 0);
      if (digit >= m_text.size() || !is_digit_of(m_text[digit], base)) break;
      end = digit + 1;
    }
    return end - place;
  }

  std::size_t float_length() const {
    std::size_t end = m_place + digits(m_place, 10);
    bool is_float = false;
    if (end < m_text.size() && m_text[end] == '.') {
      const std::size_t fraction = digits(end + 1, 10);
      if (fraction > 0) {
        is_float = true;
        end += 1 + fraction;
      }
    }
    if (end < m_text.size() && (m_text[end] | 0x20) == 'e') {
      const bool has_sign =
          end + 1 < m_text.size() && (m_text[end + 1] == '+' || m_text[end + 1] == '-');
      const std::size_t power = digits(end + (has_sign ? 2 : 1), 10);
      if (power > 0) {
        is_float = true;
        end += (has_sign ? 2 : 1) + power;
      }
    }
    return is_float ? end - m_place : 0;
  }

  void read_number() {
    const bool follows_dot = m_place > 0 && m_text[m_place - 1] == '.';
    if (const std::size_t length = follows_dot ? 0 : float_length()) {
      return add_number(length, [](const std::string& plain) {
        double number = 0;
        files::read_leading_real(plain, number);
        return Value(number);
      });
    }
    int base = 10;
    std::size_t begin = 0;
    if (sees("0") && m_place + 1 < m_text.size()) {
      const char letter = static_cast<char>(m_text[m_place + 1] | 0x20);
      base = letter == 'x' ? 16 : letter == 'o' ? 8 : letter == 'b' ? 2 : 10;
      if (base != 10 && digits(m_place + 2, base, true) > 0) begin = 2;
    }
    std::size_t length = begin;
    if (begin > 0) {
      length += digits(m_place + begin, base, true);
    } else {
      base = 10;
      length = digits(m_place, m_text[m_place] == '0' ? 1 : 10);
    }
    add_number(length, [&](const std::string& plain) {
      std::int64_t value = 0;
      const char* const last = plain.data() + plain.size();
      const auto [end, error] = std::from_chars(plain.data() + begin, last, value, base);
      if (error != std::errc() || end != last) fail("an integer is out of range");
      return Value(value);
    });
  }

  template <class Convert>
  void add_number(std::size_t length, const Convert& convert) {
    std::string plain(rest().substr(0, length));
    plain.erase(std::remove(plain.begin(), plain.end(), '_'), plain.end());
    m_tokens.push_back(
        {Kind::number, m_line, std::string(rest().substr(0, length)), convert(plain)});
    skip(length);
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
    const bool is_octal = c >= '0' && c <= '7';
    const std::size_t n_digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    if (!is_octal && n_digits == 0) {
      // Python escapes a character beyond ASCII before it reads escapes.
      if (c == 'N' || static_cast<unsigned char>(c) >= 0x80) fail("an unknown escape in a string");
      value += '\\';
      value += c;
      return;
    }
    const std::size_t begin = is_octal ? i : i + 1;
    const std::size_t most = is_octal ? 3 : n_digits;
    std::size_t end = begin;
    std::int64_t character = 0;
    while (end < std::min(begin + most, m_text.size()) &&
           is_digit_of(m_text[end], is_octal ? 8 : 16)) {
      const char d = m_text[end++];
      character = character * (is_octal ? 8 : 16) + (d <= '9' ? d - '0' : (d | 0x20) - 'a' + 10);
    }
    const bool is_complete = is_octal || end - begin == n_digits;
    if (!is_complete || character > 0x10FFFF || (character >= 0xD800 && character < 0xE000)) {
      fail("an escape of no character in a string");
    }
    append_character(value, static_cast<std::int32_t>(character));
    i = end - 1;
  }

  void read_symbol(std::string& open) {
    constexpr std::string_view symbols[] = {"//", "**", "==", "!=", ">=", "<=", "+", "-", "/",
                                            "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                            ">",  "<",  "=",  ".",  ":",  "|",  ",", ";"};
    const auto found = std::find_if(std::begin(symbols), std::end(symbols),
                                    [&](std::string_view symbol) { return sees(symbol); });
    if (found == std::end(symbols)) {
      fail(fmt::format("unexpected character {}",
                       files::in_quotes(rest().substr(0, character_at(m_text, m_place).second))));
    }
    if (*found == "(" || *found == "[" || *found == "{") {
      open += *found == "(" ? ')' : *found == "[" ? ']' : '}';
    } else if (*found == ")" || *found == "]" || *found == "}") {
      if (open.empty() || open.back() != found->front()) {
        fail(fmt::format("unexpected '{}'", *found));
      }
      open.pop_back();
    }
    m_tokens.push_back({Kind::symbol, m_line, std::string(*found), {}});
    skip(found->size());
  }

  std::string m_text;
  std::size_t m_place = 0;
  int m_line = 1;
  bool m_begins_line = true;
  std::vector<Token> m_tokens;
};

}  // namespace

std::vector<Token> tokens_of(std::string_view source) { return Lexer(source)(); }

}  // namespace kvzap::jinja
