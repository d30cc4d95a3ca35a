// Texts of values: Python's str() and repr(), and JSON.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "jinja/value.hpp"

namespace kvzap::jinja {

/// Appends str(value). Throws Failure for objects whose text has an address in Python.
void append_text(std::string& output, const Value& value, Meter& meter);

/// Appends repr(value).
void append_quoted(std::string& output, const Value& value, Meter& meter);

/// Returns Python's repr() of a float.
std::string float_text(double value);

/// Options of json.dumps().
struct JsonStyle {
  bool ensure_ascii = false;
  bool sort_keys = false;
  std::optional<std::string> indent;
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};

/// Appends json.dumps(value). Throws Failure for values without JSON.
void append_json(std::string& output, const Value& value, const JsonStyle& style, Meter& meter);

}  // namespace kvzap::jinja
