// Fields of a model's config.json and generation_config.json, each checked as it is read.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <kvzap/core/types.hpp>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "files/json_field.hpp"
#include "files/json_file.hpp"
#include "files/quote.hpp"

namespace kvzap::model {

// A bound far above any published model. It keeps a hostile file from demanding absurd amounts of
// memory before its weights are read.
inline constexpr std::int64_t max_size = 2147483647;

/// The content of config.json, some of whose fields get the names of another class
/// (Family::rename).
struct ConfigContent : nlohmann::json {
  /// Names of such fields in the file, by the names that they get.
  std::map<std::string, std::string> names_in_file;
};

/// One JSON object of a file. Remembers the fields that were read, to report the others.
class ConfigFields {
 public:
  /// `name` is the object's own field in messages, e.g. "rope_scaling"; empty: the whole file.
  ConfigFields(const nlohmann::json& object, std::string file, std::string name = "")
      : m_file(std::move(file)), m_object(object, m_file, std::move(name)) {}
  /// Messages have the names of the file.
  ConfigFields(const ConfigContent& content, std::string file)
      : m_file(std::move(file)),
        m_object(content, m_file),
        m_names_in_file(content.names_in_file) {}

  [[noreturn]] void fail(std::string_view field, std::string_view expected,
                         std::string_view found) const {
    files::throw_unexpected(named({}, std::string(field)).where(), expected,
                            files::shown(found, 300));
  }

  const std::string& file() const { return m_file; }

  /// The field's value; nullptr if it is absent or null, which mean the same in these files.
  const nlohmann::json* get(const std::string& field) {
    m_seen.insert(field);
    const auto found = m_object.value().find(field);
    return found == m_object.value().end() || found->is_null() ? nullptr : &*found;
  }

  /// Returns whether get() or a function that calls it was asked for the field.
  bool was_read(const std::string& field) const { return m_seen.count(field) != 0; }
  bool has_key(const std::string& field) const { return m_object.value().contains(field); }

  /// A whole number in [1, bound].
  std::optional<std::int64_t> find_size(const std::string& field, std::int64_t bound) {
    return find_count(field, 1, bound);
  }
  std::optional<std::int64_t> find_count(const std::string& field, std::int64_t least,
                                         std::int64_t bound) {
    return find(field, [&](const files::JsonField& value) { return value.integer(least, bound); });
  }
  std::int64_t size(const std::string& field, std::int64_t bound) {
    const auto value = find_size(field, bound);
    if (!value) fail(field, fmt::format("a whole number from 1 to {}", bound), "none");
    return *value;
  }

  /// A number above zero.
  std::optional<double> find_positive(const std::string& field) {
    return find(field, [](const files::JsonField& value) { return value.positive(); });
  }
  double positive(const std::string& field) {
    const auto value = find_positive(field);
    if (!value) fail(field, "a number above 0", "none");
    return *value;
  }

  /// A number in [low, high].
  std::optional<double> find_number(const std::string& field, double low, double high) {
    return find(field, [&](const files::JsonField& value) { return value.number(low, high); });
  }
  double number(const std::string& field, double low, double high) {
    const auto value = find_number(field, low, high);
    if (!value) fail(field, fmt::format("a number from {} to {}", low, high), "none");
    return *value;
  }

  bool flag(const std::string& field, bool fallback) {
    return find(field, [](const files::JsonField& value) { return value.boolean(); })
        .value_or(fallback);
  }

  std::optional<std::string> find_text(const std::string& field) {
    return find(field, [](const files::JsonField& value) { return value.string(); });
  }

  /// The field may only be absent, null or equal to `neutral`.
  void require(const std::string& field, const nlohmann::json& neutral) {
    const nlohmann::json* const value = get(field);
    if (value != nullptr && *value != neutral)
      fail(field, files::described(neutral), files::described(*value));
  }

  /// The field may only be absent or null.
  void require_none(const std::string& field) {
    const nlohmann::json* const value = get(field);
    if (value != nullptr) fail(field, "none (it is not supported)", files::described(*value));
  }

  /// Returns the fields that have a value, were not read and are not in `harmless`.
  std::vector<std::string> unknown(const std::set<std::string_view>& harmless) const {
    std::vector<std::string> names;
    for (const auto& [field, value] : m_object.value().items()) {
      if (value.is_null() || m_seen.count(field) != 0 || harmless.count(field) != 0) continue;
      names.push_back(field);
    }
    return names;
  }

  /// Adds a warning for each of these.
  void warn_unknown(const std::set<std::string_view>& harmless,
                    std::vector<std::string>& warnings) const {
    constexpr std::size_t most = 20;  // one warning each
    const std::vector<std::string> names = unknown(harmless);
    for (std::size_t i = 0; i < std::min(most, names.size()); ++i) {
      const nlohmann::json& value = m_object.value().at(names[i]);
      warnings.push_back(fmt::format("{}: unknown field is ignored, found {}",
                                     m_object.named(value, names[i]).where(),
                                     files::described(value)));
    }
    if (names.size() > most) {
      warnings.push_back(
          fmt::format("{}: {} further unknown fields are ignored", m_file, names.size() - most));
    }
  }

 private:
  /// Reads the field if it is there and not null.
  template <class Read>
  auto find(const std::string& field, const Read& read)
      -> std::optional<std::decay_t<decltype(read(std::declval<files::JsonField>()))>> {
    const nlohmann::json* const value = get(field);
    if (value == nullptr) return std::nullopt;
    return read(named(*value, field));
  }

  /// The field under the name that it has in the file.
  files::JsonField named(const nlohmann::json& value, const std::string& field) const {
    const auto renamed = m_names_in_file.find(field);
    return m_object.named(value, renamed == m_names_in_file.end() ? field : renamed->second);
  }

  std::string m_file;
  files::JsonField m_object;
  std::map<std::string, std::string> m_names_in_file;
  std::set<std::string> m_seen;
};

}  // namespace kvzap::model
