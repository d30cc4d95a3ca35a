// The entries of a TOML file. Separate from the parser, which not every compiler for devices can
// read.
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
  /// The value, or those of a list, as text; nothing for values that are not texts, numbers, true
  /// or false.
  std::vector<std::optional<std::string>> values;
};

/// Reads the entries of a file. Throws std::runtime_error that names file and line if it cannot be
/// read, is not a file or pipe, is not TOML, or is larger or more nested than a deck may be.
std::vector<TomlEntry> read_toml(const std::string& file);
/// Reads the entries of the file's text; `file` is for messages.
std::vector<TomlEntry> parse_toml(std::string_view text, const std::string& file);

}  // namespace kvzap::driver
