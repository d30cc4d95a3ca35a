// Checked fields of a model's config.json and generation_config.json.
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <kvzap/core/types.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/quote.hpp"

namespace kvzap::detail {

// Bounds far above any published model. A hostile file must not request absurd amounts of memory
// before its weights are checked.
inline constexpr std::int64_t max_size = 2147483647;

/// Returns a value as messages show it: JSON, cut to a readable length.
inline std::string json_text(const nlohmann::json& value) {
  constexpr std::size_t longest = 80;
  std::string text = value.dump(-1, ' ', true);
  if (text.size() > longest) text = text.substr(0, longest) + "...";
  return text;
}

/// One JSON object of a file. It remembers which fields were read, so that the others can be
/// reported.
class ConfigFields {
 public:
  /// `prefix` precedes field names in messages, e.g. "rope_scaling.".
  ConfigFields(const nlohmann::json& object, std::string file, std::string prefix = "")
      : m_object(object), m_file(std::move(file)), m_prefix(std::move(prefix)) {}

  [[noreturn]] void fail(std::string_view field, std::string_view expected,
                         std::string_view found) const {
    throw Error(fmt::format("{}: {}{}: expected {}, found {}", m_file, m_prefix, field, expected,
                            shown(found, 300)));
  }

  const std::string& file() const { return m_file; }

  /// Returns the field's value; nullptr if it is absent or null, which mean the same in these
  /// files.
  const nlohmann::json* get(const std::string& field) {
    m_seen.insert(field);
    const auto found = m_object.find(field);
    return found == m_object.end() || found->is_null() ? nullptr : &*found;
  }

  bool has_key(const std::string& field) const { return m_object.contains(field); }

  /// Returns a whole number in [1, bound].
  std::optional<std::int64_t> find_size(const std::string& field, std::int64_t bound) {
    const nlohmann::json* const value = get(field);
    if (value == nullptr) return std::nullopt;
    const bool is_valid = value->is_number_unsigned() && value->get<std::uint64_t>() >= 1 &&
                          value->get<std::uint64_t>() <= static_cast<std::uint64_t>(bound);
    if (!is_valid)
      fail(field, fmt::format("a whole number from 1 to {}", bound), json_text(*value));
    return value->get<std::int64_t>();
  }

  std::int64_t size(const std::string& field, std::int64_t bound) {
    const auto value = find_size(field, bound);
    if (!value) fail(field, fmt::format("a whole number from 1 to {}", bound), "none");
    return *value;
  }

  /// Returns a number above zero.
  std::optional<double> find_positive(const std::string& field) {
    const nlohmann::json* const value = get(field);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number() || !std::isfinite(value->get<double>()) ||
        !(value->get<double>() > 0)) {
      fail(field, "a number above 0", json_text(*value));
    }
    return value->get<double>();
  }

  double positive(const std::string& field) {
    const auto value = find_positive(field);
    if (!value) fail(field, "a number above 0", "none");
    return *value;
  }

  /// Returns a number in [low, high].
  std::optional<double> find_number(const std::string& field, double low, double high) {
    const nlohmann::json* const value = get(field);
    if (value == nullptr) return std::nullopt;
    // NaN fails this comparison too.
    if (!value->is_number() || !(value->get<double>() >= low) || !(value->get<double>() <= high)) {
      fail(field, fmt::format("a number from {} to {}", low, high), json_text(*value));
    }
    return value->get<double>();
  }

  double number(const std::string& field, double low, double high) {
    const auto value = find_number(field, low, high);
    if (!value) fail(field, fmt::format("a number from {} to {}", low, high), "none");
    return *value;
  }

  bool flag(const std::string& field, bool fallback) {
    const nlohmann::json* const value = get(field);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) fail(field, "true or false", json_text(*value));
    return value->get<bool>();
  }

  std::optional<std::string> find_text(const std::string& field) {
    const nlohmann::json* const value = get(field);
    if (value == nullptr) return std::nullopt;
    if (!value->is_string()) fail(field, "a string", json_text(*value));
    return value->get<std::string>();
  }

  /// Throws Error unless the field is absent, null or equal to `neutral`.
  void require(const std::string& field, const nlohmann::json& neutral) {
    const nlohmann::json* const value = get(field);
    if (value != nullptr && *value != neutral) fail(field, json_text(neutral), json_text(*value));
  }

  /// Throws Error unless the field is absent or null.
  void require_none(const std::string& field) {
    const nlohmann::json* const value = get(field);
    if (value != nullptr) fail(field, "none (it is not supported)", json_text(*value));
  }

  /// Adds a warning for every field that was not read and is not in `harmless`.
  void warn_unknown(const std::set<std::string_view>& harmless,
                    std::vector<std::string>& warnings) const {
    constexpr std::size_t most = 20;  // fields named one by one
    std::size_t count = 0;
    for (const auto& [field, value] : m_object.items()) {
      if (value.is_null() || m_seen.count(field) != 0 || harmless.count(field) != 0) continue;
      if (++count > most) continue;
      warnings.push_back(fmt::format("{}: {}{}: unknown field is ignored, found {}", m_file,
                                     m_prefix, shown(field), json_text(value)));
    }
    if (count > most) {
      warnings.push_back(
          fmt::format("{}: {} further unknown fields are ignored", m_file, count - most));
    }
  }

 private:
  const nlohmann::json& m_object;
  std::string m_file;
  std::string m_prefix;
  std::set<std::string> m_seen;
};

}  // namespace kvzap::detail
