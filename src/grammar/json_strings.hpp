// Strings of JSON: how their characters are spelt, and the formats that schemas name.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "grammar/expression.hpp"

namespace kvzap::grammar {

/// One character of the ranges inside a string, in its canonical spelling: the quotation mark, the
/// backslash and control characters escaped (by a letter if JSON has one, otherwise as \u00XX with
/// lower-case digits), all others as UTF-8.
Expr json_character(const std::vector<CodePoints>& ranges);
/// One character of a string in any spelling of JSON. A character beyond U+FFFF may be a pair of
/// escapes; half of a pair is no character.
Expr any_json_character();

/// The text of a string with its quotation marks, in the canonical spelling. `text` is UTF-8.
std::string json_string(std::string_view text);
/// The expression of `content` between quotation marks.
Expr quoted(Expr content);

/// The strings of a `format`, in canonical spelling without quotation marks; null if a schema's
/// format is only a note. Every such string is valid: dates are those of the calendar.
Expr json_format(std::string_view name);

}  // namespace kvzap::grammar
