// Reads grammars in GBNF, the notation of llama.cpp.
#pragma once

#include <string_view>

#include "grammar/expression.hpp"

namespace kvzap::grammar {

/// Largest text in bytes, number of rules, and nesting of groups.
inline constexpr std::size_t max_gbnf_bytes = 1U << 20U;
inline constexpr std::size_t max_gbnf_rules = 65'536;
inline constexpr int max_gbnf_depth = 100;

/// Returns the grammar of `text` (UTF-8), whose root is the rule `root`. Rules are `name ::= …`;
/// one ends where the next begins. They consist of "literals", [classes], `.` for any character,
/// names, ( groups ) and |, with *, +, ?, {n}, {n,} and {n,m} after a part, and may be left
/// recursive. Escapes are \n, \r, \t, \\, \", \[, \], \xHH, \uXXXX and \UXXXXXXXX; all of these
/// name characters, not bytes. Throws Error "grammar, line L, column C: …" for what is wrong, names
/// no rule or makes no text, and for texts in Lark's notation.
Grammar read_gbnf(std::string_view text);

}  // namespace kvzap::grammar
