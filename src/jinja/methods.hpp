// Functions that several tables share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "jinja/evaluator.hpp"

namespace kvzap::jinja {

/// Returns the entry of a table, or null.
template <class Entry, std::size_t size>
Entry find_in(const std::pair<std::string_view, Entry> (&table)[size], std::string_view name) {
  const auto found = std::find_if(std::begin(table), std::end(table),
                                  [&](const auto& entry) { return entry.first == name; });
  return found == std::end(table) ? nullptr : found->second;
}

Function find_string_method(std::string_view name);

/// str.isupper() and str.islower().
bool has_case(std::string_view text, bool upper_case);
/// str.splitlines().
std::vector<std::string_view> split_lines(std::string_view text, Meter& meter);
/// str.replace(); `most` < 0: all.
Value replaced(Evaluator& evaluator, std::string_view text, std::string_view from,
               std::string_view to, std::int64_t most);

/// Returns the value that filters find by an attribute: a name, a number, or several with dots
/// between them. None is the value itself. `otherwise` replaces undefined values; null: nothing
/// does.
Value attribute_of(Evaluator& evaluator, const Value& value, const Value* attribute,
                   const Value* otherwise = nullptr);

}  // namespace kvzap::jinja
