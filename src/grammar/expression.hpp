// Grammars of answers: rules over bytes, tokens and other rules.
#pragma once

#include <bitset>
#include <cstdint>
#include <kvzap/core/types.hpp>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvzap::grammar {

using ByteSet = std::bitset<256>;
using RuleId = std::int32_t;
/// First and last code point of a range.
using CodePoints = std::pair<char32_t, char32_t>;
inline constexpr char32_t last_code_point = 0x10FFFF;

struct Expression;
/// An expression is immutable; expressions share their parts.
using Expr = std::shared_ptr<const Expression>;

constexpr std::int64_t unlimited = std::numeric_limits<std::int64_t>::max();

/// What a part of an answer may be. Make it by the functions below.
struct Expression {
  enum class Kind {
    nothing,     // no text, not even the empty one
    bytes,       // one byte of a set
    text,        // the bytes of a text
    token,       // one special token, which no bytes spell
    sequence,    // parts in order; none: the empty text
    choice,      // one of the parts
    repeat,      // part 0, `least` to `most` times
    call,        // a rule
    both,        // what part 0 and part 1 match
    difference,  // what part 0 matches, but not part 1
  };
  Kind kind = Kind::nothing;
  ByteSet bytes;
  std::string text;
  TokenId token = -1;
  RuleId rule = -1;
  std::int64_t least = 0, most = 0;
  std::vector<Expr> parts;
};

Expr nothing();
Expr empty();
Expr one_byte(const ByteSet& bytes);
/// Any bytes, or none.
Expr any_text();
/// The bytes of a text.
Expr literal(std::string_view text);
Expr special_token(TokenId token);
Expr sequence(std::vector<Expr> parts);
Expr choice(std::vector<Expr> parts);
Expr repeat(Expr part, std::int64_t least, std::int64_t most = unlimited);
inline Expr optional(Expr part) { return repeat(std::move(part), 0, 1); }
Expr call(RuleId rule);
/// Both parts must be regular: without calls and tokens.
Expr both(Expr a, Expr b);
Expr difference(Expr a, Expr b);

/// One code point of the ranges, in UTF-8. Ranges may overlap and be unsorted; surrogates and what
/// is beyond U+10FFFF are left out.
Expr code_point(const std::vector<CodePoints>& ranges);
/// The code points that are in none of the ranges.
std::vector<CodePoints> complement(std::vector<CodePoints> ranges);
/// The shortest text that ends with `mark`: the mark is not in what precedes it.
Expr until(std::string_view mark);

/// Rules, and the one with which texts begin.
struct Grammar {
  struct Rule {
    std::string name;  // in messages
    Expr body;         // null until it is defined
  };
  std::vector<Rule> rules;
  RuleId root = 0;

  /// Adds a rule whose body follows later, so that bodies can call each other.
  RuleId add(std::string name, Expr body = nullptr) {
    rules.push_back({std::move(name), std::move(body)});
    return static_cast<RuleId>(rules.size()) - 1;
  }
};

}  // namespace kvzap::grammar
