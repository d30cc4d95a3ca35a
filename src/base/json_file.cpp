#include "base/json_file.hpp"

#include <fmt/format.h>

#include <fstream>
#include <set>
#include <system_error>
#include <vector>

namespace kvzap::detail {

nlohmann::json parse_json(std::string_view text, const std::string& what) {
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

nlohmann::json read_json_object(const std::filesystem::path& file, std::uintmax_t max_bytes) {
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
