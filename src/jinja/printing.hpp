// Texts of values: Python's str(), repr() and formats, and JSON.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "jinja/evaluator.hpp"

namespace kvzap::jinja {

/// Appends str(value). Throws Failure for objects whose text has an address in Python.
void append_text(std::string& output, const Value& value, Meter& meter);

/// Options of json.dumps().
struct JsonStyle {
  bool ensure_ascii = false;
  bool sort_keys = false;
  std::optional<std::string> indent;
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};

/// Appends repr(value) or, with a style, json.dumps(value). Throws Failure for values without one.
void append_quoted(std::string& output, const Value& value, Meter& meter,
                   const JsonStyle* json = nullptr);

/// Returns format % value. A tuple gives several values, a dict named ones. `escapes`: values
/// become escaped for HTML, as in a safe format. Throws Failure.
std::string percent_formatted(Evaluator& evaluator, std::string_view format, const Value& value,
                              bool escapes);

/// Returns format.format(arguments). Fields are empty, a number or a name, with a conversion !s or
/// !r and a format specification; attributes and items of values are refused. Throws Failure.
std::string brace_formatted(Evaluator& evaluator, std::string_view format,
                            const Arguments& arguments, bool escapes);

}  // namespace kvzap::jinja
