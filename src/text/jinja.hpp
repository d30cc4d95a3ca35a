// Chat templates taken apart: a Jinja template as outputs and statements, in a canonical spelling.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap::detail::jinja {

bool is_name(char c);
bool starts_with(std::string_view text, std::string_view start);
bool ends_with(std::string_view text, std::string_view end);
bool is_one_of(std::string_view text, std::initializer_list<std::string_view> values);

/// Without the white space at both ends that Python's str.strip() removes.
std::string_view trimmed(std::string_view text);

/// A string literal as canonical expressions have it: double quotes; \n, \" and \\ escaped.
std::string quote_literal(std::string_view text);

struct Token {
  enum Kind { literal, name, symbol } kind;
  std::string text;  // of a literal: the value
};

/// Whether tokens[index] is that symbol.
bool is_symbol(const std::vector<Token>& tokens, std::size_t index, char symbol);

/// The canonical spelling of an expression.
std::string spelled(const std::vector<Token>& tokens);

/// What a template consists of: outputs (with the text between tags as literals) and statements.
struct Node {
  enum Kind { output, statement } kind;
  std::vector<Token> tokens;
};

/// Splits a template into nodes, with the white-space rules of transformers' environment:
/// trim_blocks and lstrip_blocks. Returns nothing for an unclosed tag.
std::optional<std::vector<Node>> parse(std::string_view source);

}  // namespace kvzap::detail::jinja
