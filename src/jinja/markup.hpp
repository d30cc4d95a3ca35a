// Strings that are escaped for HTML: what the filters safe and escape return.
#pragma once

#include <string>
#include <string_view>

#include "jinja/evaluator.hpp"

namespace kvzap::jinja {

/// Returns `text` with entities for & < > " and '.
std::string escaped(std::string_view text);

/// Returns whether the value is an escaped string.
inline bool is_safe(const Value& value) { return value.text() != nullptr && value.text()->is_safe; }

/// Returns a string that is escaped if `model` is.
Value make_like(Evaluator& evaluator, const Value& model, std::string text);

/// Calls a method of an escaped string: its arguments become escaped, and so do its results.
Value call_of_safe(Evaluator& evaluator, const Callable& method, Arguments& arguments);

}  // namespace kvzap::jinja
