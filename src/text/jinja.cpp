#include "text/jinja.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "text/utf8.hpp"

namespace kvzap::text::jinja {

bool is_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}
bool starts_with(std::string_view text, std::string_view start) {
  return text.substr(0, start.size()) == start;
}
bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}
bool is_one_of(std::string_view text, std::initializer_list<std::string_view> values) {
  return std::find(values.begin(), values.end(), text) != values.end();
}

namespace {

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// White space that Jinja strips around tags and that Python's str.strip(), its `trim`, removes.
// (Inside tags, is_space suffices: other characters are symbols there, and are refused.)
constexpr std::string_view spaces[] = {" ",      "\t",     "\n",     "\v",     "\f",     "\r",
                                       "\x1C",   "\x1D",   "\x1E",   "\x1F",   "\u0085", "\u00A0",
                                       "\u1680", "\u2000", "\u2001", "\u2002", "\u2003", "\u2004",
                                       "\u2005", "\u2006", "\u2007", "\u2008", "\u2009", "\u200A",
                                       "\u2028", "\u2029", "\u202F", "\u205F", "\u3000"};

std::string_view left_trimmed(std::string_view text) {
  const auto leads = [&](std::string_view space) { return starts_with(text, space); };
  for (;;) {
    const auto found = std::find_if(std::begin(spaces), std::end(spaces), leads);
    if (found == std::end(spaces)) return text;
    text.remove_prefix(found->size());
  }
}

std::string_view right_trimmed(std::string_view text) {
  const auto ends = [&](std::string_view space) { return ends_with(text, space); };
  for (;;) {
    const auto found = std::find_if(std::begin(spaces), std::end(spaces), ends);
    if (found == std::end(spaces)) return text;
    text.remove_suffix(found->size());
  }
}

}  // namespace

std::string_view trimmed(std::string_view text) { return right_trimmed(left_trimmed(text)); }

std::string quote_literal(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '\n') {
      result += "\\n";
    } else {
      if (c == '"' || c == '\\') result += '\\';
      result += c;
    }
  }
  return result + '"';
}

namespace {

// Appends the character of a Python escape whose backslash is before source[i], and moves i to its
// last character. Returns false for an escape by character name and for an unknown escape.
bool append_escape(std::string_view source, std::size_t& i, std::string& value) {
  constexpr std::string_view letters = "abfnrtv\\'\"", values = "\a\b\f\n\r\t\v\\'\"";
  const char c = source[i];
  if (const std::size_t found = letters.find(c); found != letters.npos) {
    value += values[found];
    return true;
  }
  if (c == '\n') return true;  // a continued line
  const bool is_octal = c >= '0' && c <= '7';
  const std::size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
  if (!is_octal && digits == 0) {
    value += '\\';
    value += c;
    return c != 'N' && static_cast<unsigned char>(c) < 0x80;
  }
  std::int64_t codepoint = 0;
  if (is_octal) {
    std::size_t end = i;
    for (; end < std::min(i + 3, source.size()) && source[end] >= '0' && source[end] <= '7';
         ++end) {
      codepoint = codepoint * 8 + (source[end] - '0');
    }
    i = end - 1;
  } else {
    for (std::size_t k = 1; k <= digits; ++k) {
      const char d = i + k < source.size() ? source[i + k] : '\0';
      const bool is_digit = d >= '0' && d <= '9';
      const char lower = static_cast<char>(d | 0x20);
      if (!is_digit && (lower < 'a' || lower > 'f')) return false;
      codepoint = codepoint * 16 + (is_digit ? d - '0' : lower - 'a' + 10);
    }
    i += digits;
  }
  if (codepoint > 0x10FFFF || (codepoint >= 0xD800 && codepoint < 0xE000)) return false;
  append_utf8(value, static_cast<utf8proc_int32_t>(codepoint));
  return true;
}

// Returns the tokens of an expression, or nothing for an unclosed literal. Each operator character
// is one token; `~` becomes `+`.
std::optional<std::vector<Token>> expression_tokens(std::string_view source) {
  std::vector<Token> tokens;
  for (std::size_t i = 0; i < source.size();) {
    const char c = source[i];
    if (is_space(c)) {
      ++i;
    } else if (c == '"' || c == '\'') {
      std::string value;
      for (++i; i < source.size() && source[i] != c; ++i) {
        if (source[i] == '\\' && i + 1 < source.size()) {
          ++i;
          if (!append_escape(source, i, value)) return std::nullopt;
        } else {
          value += source[i];
        }
      }
      if (i == source.size()) return std::nullopt;
      ++i;
      tokens.push_back({Token::literal, std::move(value)});
    } else if (is_name(c)) {
      std::size_t end = i;
      while (end < source.size() && is_name(source[end])) ++end;
      tokens.push_back({Token::name, std::string(source.substr(i, end - i))});
      i = end;
    } else {
      tokens.push_back({Token::symbol, std::string(1, c == '~' ? '+' : c)});
      ++i;
    }
  }
  return tokens;
}

}  // namespace

bool is_symbol(const std::vector<Token>& tokens, std::size_t index, char symbol) {
  return index < tokens.size() && tokens[index].kind == Token::symbol &&
         tokens[index].text[0] == symbol;
}

namespace {

// Turns x["key"] into x.key and x[0] into x.0, and drops parentheses around whole expressions.
std::vector<Token> simplified(const std::vector<Token>& tokens) {
  std::vector<Token> result;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const bool subscript =
        is_symbol(tokens, i, '[') && is_symbol(tokens, i + 2, ']') && !result.empty() &&
        result.back().kind == Token::name && tokens[i + 1].kind != Token::symbol &&
        !tokens[i + 1].text.empty() &&
        std::all_of(tokens[i + 1].text.begin(), tokens[i + 1].text.end(), is_name);
    if (subscript) {
      result.push_back({Token::symbol, "."});
      result.push_back({Token::name, tokens[i + 1].text});
      i += 2;
    } else {
      result.push_back(tokens[i]);
    }
  }
  const auto wrapped = [&] {
    if (!is_symbol(result, 0, '(')) return false;
    int depth = 0;
    for (std::size_t i = 0; i < result.size(); ++i) {
      if (is_symbol(result, i, '(')) ++depth;
      if (is_symbol(result, i, ')') && --depth == 0) return i + 1 == result.size();
    }
    return false;
  };
  if (wrapped()) {
    result.pop_back();
    result.erase(result.begin());
  }
  return result;
}

}  // namespace

std::string spelled(const std::vector<Token>& tokens) {
  std::string result;
  for (const Token& token : tokens) {
    const std::string text = token.kind == Token::literal ? quote_literal(token.text) : token.text;
    if (!result.empty() && is_name(result.back()) && is_name(text.front())) result += ' ';
    result += text;
  }
  return result;
}

std::optional<std::vector<Node>> parse(std::string_view source) {
  if (ends_with(source, "\n")) source.remove_suffix(1);
  std::vector<Node> nodes;
  bool strip_left = false;   // the previous tag ended with -
  bool after_block = false;  // it was a statement or comment: trim_blocks
  bool line_start = true;    // the text begins a line
  std::size_t position = 0;
  while (position < source.size()) {
    std::size_t tag = position;
    while (tag < source.size() && !(source[tag] == '{' && tag + 1 < source.size() &&
                                    is_one_of(source.substr(tag + 1, 1), {"{", "%", "#"}))) {
      ++tag;
    }
    std::string_view text = source.substr(position, tag - position);
    const char kind = tag < source.size() ? source[tag + 1] : '\0';
    const char control = kind != '\0' && tag + 2 < source.size() ? source[tag + 2] : '\0';
    if (strip_left) {
      text = left_trimmed(text);
    } else if (after_block && starts_with(text, "\n")) {
      text.remove_prefix(1);
      line_start = true;
    }
    if (control == '-') {
      text = right_trimmed(text);
    } else if ((kind == '%' || kind == '#') && control != '+') {
      const std::size_t newline = text.rfind('\n');
      const std::size_t begin = newline == std::string_view::npos ? 0 : newline + 1;
      const std::string_view indent = text.substr(begin);
      if ((begin > 0 || line_start) && left_trimmed(indent).empty()) {
        text = text.substr(0, begin);
      }
    }
    if (!text.empty()) nodes.push_back({Node::output, {{Token::literal, std::string(text)}}});
    if (kind == '\0') break;

    const std::string close = kind == '{' ? "}}" : std::string{kind, '}'};
    const bool has_control = control == '-' || control == '+';
    const std::size_t begin = tag + (has_control ? 3 : 2);
    std::size_t end = begin;
    for (char quote = '\0'; end < source.size(); ++end) {
      const char c = source[end];
      if (quote != '\0') {
        if (c == '\\') ++end;
        if (c == quote) quote = '\0';
      } else if (kind != '#' && (c == '"' || c == '\'')) {
        quote = c;
      } else if (starts_with(source.substr(end), close)) {
        break;
      }
    }
    if (end >= source.size()) return std::nullopt;
    std::string_view body = source.substr(begin, end - begin);
    strip_left = ends_with(body, "-");
    after_block = kind != '{' && !ends_with(body, "+");
    if (strip_left || ends_with(body, "+")) body.remove_suffix(1);
    line_start = false;
    position = end + 2;
    if (kind != '#') {
      const auto tokens = expression_tokens(body);
      if (!tokens) return std::nullopt;
      nodes.push_back({kind == '{' ? Node::output : Node::statement, simplified(*tokens)});
    }
  }
  return nodes;
}

}  // namespace kvzap::text::jinja
