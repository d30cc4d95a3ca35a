// Splits a template into texts and the tokens of its tags.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "jinja/value.hpp"

namespace kvzap::jinja {

struct Token {
  enum class Kind {
    text,  // between tags
    output_begin,
    output_end,
    block_begin,
    block_end,
    name,
    string,
    number,
    symbol,
    end
  };

  Kind kind = Kind::end;
  int line = 1;
  std::string text;  // for a string: its value
  Value number;
};

/// Why a template is no Jinja.
struct SyntaxFailure : Failure {
  SyntaxFailure(int where, const std::string& message) : Failure(message), line(where) {}
  int line;
};

/// Splits `source`, UTF-8. White space follows the rules of transformers' environment: the first
/// newline after a block is dropped, and so is white space before a block that begins its line.
/// Throws SyntaxFailure.
std::vector<Token> tokens_of(std::string_view source);

}  // namespace kvzap::jinja
