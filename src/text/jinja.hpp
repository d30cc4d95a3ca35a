// Parser of chat templates: it splits a Jinja template into outputs and statements, spelled
// uniformly.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap::text::jinja {

bool is_name(char c);
bool starts_with(std::string_view text, std::string_view start);
bool ends_with(std::string_view text, std::string_view end);
bool is_one_of(std::string_view text, std::initializer_list<std::string_view> values);

/// Returns `text` without the white space at both ends that Python's str.strip() removes.
std::string_view trimmed(std::string_view text);

/// Returns a string literal in canonical form: double quotes; \n, \" and \\ escaped.
std::string quote_literal(std::string_view text);

struct Token {
  enum Kind { literal, name, symbol } kind;
  std::string text;  // for a literal: the value
};

/// Returns whether tokens[index] is that symbol.
bool is_symbol(const std::vector<Token>& tokens, std::size_t index, char symbol);

/// Returns the canonical spelling of an expression.
std::string spelled(const std::vector<Token>& tokens);

/// A part of a template: an output (text between tags is a literal) or a statement.
struct Node {
  enum Kind { output, statement } kind;
  std::vector<Token> tokens;
};

/// Splits a template into nodes, with the white-space rules of transformers' environment:
/// trim_blocks and lstrip_blocks. Returns nothing for an unclosed tag.
std::optional<std::vector<Node>> parse(std::string_view source);

}  // namespace kvzap::text::jinja
