// The entries of a TOML file, apart from the parser: not every compiler of device code can read it.
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
  /// The value, or those of a list, as text; nothing for what is no text, number, true or false.
  std::vector<std::optional<std::string>> values;
};

/// Throws std::runtime_error naming file and line if it cannot be read, is no file or pipe, is not
/// TOML, or is larger or nested deeper than any deck.
std::vector<TomlEntry> read_toml(const std::string& file);
/// The same of the file's text; `file` is for messages.
std::vector<TomlEntry> parse_toml(std::string_view text, const std::string& file);

}  // namespace kvzap::driver
