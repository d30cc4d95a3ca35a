// The tokens of a template in order, for the parser.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "files/quote.hpp"
#include "jinja/lexer.hpp"

namespace kvzap::jinja {

class TokenStream {
 public:
  explicit TokenStream(std::vector<Token> tokens) : m_tokens(std::move(tokens)) {}

  const Token& current() const { return m_tokens[m_place]; }
  const Token& next() const { return m_tokens[std::min(m_place + 1, m_tokens.size() - 1)]; }
  int line() const { return current().line; }

  Token take() {
    Token token = current();
    if (m_place + 1 < m_tokens.size()) ++m_place;
    return token;
  }

  bool sees(Token::Kind kind) const { return current().kind == kind; }
  bool sees_name(std::string_view name) const { return is(current(), Token::Kind::name, name); }
  bool sees_symbol(std::string_view text) const { return is(current(), Token::Kind::symbol, text); }
  bool sees_next_name(std::string_view name) const { return is(next(), Token::Kind::name, name); }
  bool sees_next_symbol(std::string_view text) const {
    return is(next(), Token::Kind::symbol, text);
  }

  bool skip_name(std::string_view name) { return sees_name(name) && skip(); }
  bool skip_symbol(std::string_view text) { return sees_symbol(text) && skip(); }

  void expect_name(std::string_view name) {
    if (!skip_name(name)) fail_expected(name);
  }
  void expect_symbol(std::string_view text) {
    if (!skip_symbol(text)) fail_expected(text);
  }
  void expect(Token::Kind kind, std::string_view description) {
    if (!sees(kind)) fail_expected(description);
    skip();
  }
  std::string expect_any_name() {
    if (!sees(Token::Kind::name)) fail_expected("a name");
    return take().text;
  }

  [[noreturn]] void fail(const std::string& message) const { throw SyntaxFailure(line(), message); }
  [[noreturn]] void fail_expected(std::string_view expected) const {
    fail(fmt::format("expected {}, found {}", expected, description()));
  }

  /// Describes the current token, for messages.
  std::string description() const {
    switch (current().kind) {
      case Token::Kind::text:
        return "text";
      case Token::Kind::output_begin:
        return "{{";
      case Token::Kind::output_end:
        return "}}";
      case Token::Kind::block_begin:
        return "{%";
      case Token::Kind::block_end:
        return "%}";
      case Token::Kind::end:
        return "the end of the template";
      default:
        return files::in_quotes(current().text);
    }
  }

 private:
  static bool is(const Token& token, Token::Kind kind, std::string_view text) {
    return token.kind == kind && token.text == text;
  }
  bool skip() {
    take();
    return true;
  }

  std::vector<Token> m_tokens;
  std::size_t m_place = 0;
};

/// Counts nesting, so neither the parser nor the evaluator exhausts the stack.
class Nesting {
 public:
  Nesting(int& depth, const TokenStream& stream) : m_depth(depth) {
    if (++m_depth > most) stream.fail("the template is nested too deep");
  }
  ~Nesting() { --m_depth; }
  Nesting(const Nesting&) = delete;
  Nesting& operator=(const Nesting&) = delete;

  static constexpr int most = 200;

 private:
  int& m_depth;
};

}  // namespace kvzap::jinja
