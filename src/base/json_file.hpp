// Reading of JSON that somebody else wrote: size, nesting and repeated keys are checked.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <kvzap/types.hpp>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace kvzap::detail {

/// Deepest nesting of objects and arrays that any file of a model folder needs, with room to spare.
inline constexpr int max_json_depth = 64;

/// Parses `text`; `what` names it in messages. Throws Error for anything that is not one JSON
/// value, for nesting deeper than max_json_depth and for a key that is repeated within one object
/// (parsers disagree on which of the two counts).
inline nlohmann::json parse_json(std::string_view text, const std::string& what) {
  std::vector<std::set<std::string>> keys;
  const auto check = [&](int depth, nlohmann::json::parse_event_t event,
                         nlohmann::json& parsed) -> bool {
    using Event = nlohmann::json::parse_event_t;
    if (event == Event::object_start || event == Event::array_start) {
      if (depth >= max_json_depth) {
        throw Error(fmt::format("{}: JSON is nested too deeply: expected at most {} levels", what,
                                max_json_depth));
      }
      keys.resize(static_cast<std::size_t>(depth) + 1);
      keys.back().clear();
    } else if (event == Event::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      keys.resize(static_cast<std::size_t>(depth));
      if (!keys.back().insert(key).second) {
        throw Error(fmt::format("{}: key '{}' is given more than once", what, key));
      }
    }
    return true;
  };
  try {
    return nlohmann::json::parse(text.begin(), text.end(), check);
  } catch (const nlohmann::json::exception& error) {
    throw Error(fmt::format("{}: not valid JSON: {}", what, error.what()));
  }
}

/// Reads and parses a JSON file that must hold an object. Throws Error for a missing file, one
/// larger than `max_bytes`, or anything but an object.
inline nlohmann::json read_json_object(const std::filesystem::path& file,
                                       std::uintmax_t max_bytes = 64u << 20) {
  const std::string what = file.string();
  std::error_code status;
  if (!std::filesystem::is_regular_file(file, status)) {
    throw Error(fmt::format("{}: no such file", what));
  }
  const std::uintmax_t bytes = std::filesystem::file_size(file, status);
  if (status) throw Error(fmt::format("{}: cannot be read: {}", what, status.message()));
  if (bytes > max_bytes) {
    throw Error(
        fmt::format("{}: too large: expected at most {} bytes, found {}", what, max_bytes, bytes));
  }
  std::string text(static_cast<std::size_t>(bytes), '\0');
  std::ifstream stream(file, std::ios::binary);
  if (!stream.read(text.data(), static_cast<std::streamsize>(text.size()))) {
    throw Error(fmt::format("{}: cannot be read", what));
  }
  nlohmann::json value = parse_json(text, what);
  if (!value.is_object()) {
    throw Error(fmt::format("{}: expected a JSON object, found {}", what, value.type_name()));
  }
  return value;
}

}  // namespace kvzap::detail
