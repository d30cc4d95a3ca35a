// Whether regular expressions match short texts, such as the keys of a schema.
#pragma once

#include <string_view>

#include "grammar/expression.hpp"

namespace kvzap::grammar {

/// Whether `expression`, which has no calls and tokens, matches all of `text`. Takes time and
/// memory of the order of the expression's size × the square of the text's.
bool matches(const Expr& expression, std::string_view text);

}  // namespace kvzap::grammar
