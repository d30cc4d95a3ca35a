// Reads the entries of a TOML file. Separate from the parser, because not every compiler for
// devices can read toml++.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap::driver {

/// One key of the file's top level.
struct TomlEntry {
  std::string key;
  std::int64_t line = 0;
  bool is_list = false;
  bool is_flag = false;  // true or false
  /// The value, or the values of a list, as text. Nothing for values that are not texts, numbers,
  /// true or false.
  std::vector<std::optional<std::string>> values;
};

/// Reads the entries of a file. Throws std::runtime_error that names file and line if it cannot be
/// read, is not a file or pipe, is not TOML, or exceeds the size or nesting of decks.
std::vector<TomlEntry> read_toml(const std::string& file);
/// Parses the text of a file; `file` is for messages.
std::vector<TomlEntry> parse_toml(std::string_view text, const std::string& file);

}  // namespace kvzap::driver
