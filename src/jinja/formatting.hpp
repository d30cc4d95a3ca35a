// Python's formats of strings: "%s" % value and "{}".format(value).
#pragma once

#include <string>
#include <string_view>

#include "jinja/evaluator.hpp"

namespace kvzap::jinja {

/// Returns format % value. A tuple gives several values, a dict named ones. `escapes`: values
/// become escaped for HTML, as in a safe format. Throws Failure.
std::string percent_formatted(Evaluator& evaluator, std::string_view format, const Value& value,
                              bool escapes);

/// Returns format.format(arguments). Fields are empty, a number or a name, with a conversion !s or
/// !r and a format specification; attributes and items of values are refused. Throws Failure.
std::string brace_formatted(Evaluator& evaluator, std::string_view format,
                            const Arguments& arguments, bool escapes);

}  // namespace kvzap::jinja
