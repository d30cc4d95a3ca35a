// Splits a template into texts and the tokens of its tags.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "files/quote.hpp"
#include "jinja/syntax.hpp"

namespace kvzap::jinja {

struct Token {
  enum class Kind { text, string, number, end, name, symbol, tag };

  Kind kind = Kind::end;
  int line = 1;
  std::string text;  // between tags; a string's value; "{{", "}}", "{%" or "%}" of a tag
  Value number;

  bool is(std::string_view word) const { return kind >= Kind::name && text == word; }
};

/// Splits `source`, UTF-8. White space follows the rules of transformers' environment: the first
/// newline after a block is dropped, and so is white space before a block that begins its line.
/// Throws SyntaxFailure.
std::vector<Token> tokens_of(std::string_view source);

/// The tokens of a template in order.
class TokenStream {
 public:
  using Kind = Token::Kind;
  using Words = std::initializer_list<std::string_view>;

  explicit TokenStream(std::string_view source) : m_tokens(tokens_of(source)) {}

  const Token& current() const { return m_tokens[m_place]; }
  const Token& next() const { return m_tokens[std::min(m_place + 1, m_tokens.size() - 1)]; }
  int line() const { return current().line; }
  bool sees(Kind kind) const { return current().kind == kind; }
  bool sees(std::string_view word) const { return current().is(word); }
  bool sees_any(Words words) const {
    return std::any_of(words.begin(), words.end(), [&](auto word) { return sees(word); });
  }

  Token take() {
    Token token = current();
    if (m_place + 1 < m_tokens.size()) ++m_place;
    return token;
  }
  bool skip(std::string_view word) {
    const bool skips = sees(word);
    if (skips) take();
    return skips;
  }
  void expect(std::string_view word) {
    if (!skip(word)) fail_expected(word);
  }
  std::string expect_name() {
    if (!sees(Kind::name)) fail_expected("a name");
    return take().text;
  }

  [[noreturn]] void fail(const std::string& message) const { throw SyntaxFailure(line(), message); }
  [[noreturn]] void fail_expected(std::string_view expected) const {
    fail(fmt::format("expected {}, found {}", expected, description()));
  }
  /// Describes the current token, for messages.
  std::string description() const {
    if (sees(Kind::text)) return "text";
    if (sees(Kind::end)) return "the end of the template";
    return sees(Kind::tag) ? current().text : files::in_quotes(current().text);
  }

 private:
  std::vector<Token> m_tokens;
  std::size_t m_place = 0;
};

}  // namespace kvzap::jinja
