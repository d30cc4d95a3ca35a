// Reads regular expressions of ECMA-262.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "grammar/expression.hpp"

namespace kvzap::grammar {

/// The texts that stand for one character of the ranges: `code_point` for plain text,
/// `json_character` inside strings of JSON.
using CharacterWriter = std::function<Expr(const std::vector<CodePoints>&)>;

/// What of a text the expression describes.
enum class Extent {
  whole,   // all of it, as vLLM's guided_regex
  search,  // some part of it, as JSON schema's `pattern`, unless ^ and $ bind it
};

/// Longest pattern in bytes, deepest nesting of groups, and largest count in braces.
inline constexpr std::size_t max_pattern_bytes = 65'536;
inline constexpr int max_pattern_depth = 100;
inline constexpr std::int64_t max_repeat_count = 100'000;

/// Returns the texts that `pattern` (UTF-8) matches, without calls of rules. ^ and $ bind the start
/// and the end of the text, not of lines; \d, \w and \s are those of ECMA-262; lazy quantifiers
/// match what greedy ones do. Throws Error "regular expression, byte N: …" for a pattern that is
/// wrong, exceeds the limits above, or has back references, lookaround, \b, flags, scripts (\p{…}
/// of general categories is read) or anchors in a repeated group.
Expr read_regular_expression(std::string_view pattern, const CharacterWriter& write,
                             Extent extent = Extent::whole);

}  // namespace kvzap::grammar
