// Reads fields of JSON files, with errors "FILE: FIELD: expected …, found …".
#pragma once

#include <cstddef>
#include <cstdint>
#include <kvzap/core/types.hpp>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace kvzap::files {

/// Throws Error "WHERE: expected …, found …".
[[noreturn]] void throw_unexpected(const std::string& where, std::string_view expected,
                                   std::string_view found);

/// A text in quotes for messages, its first characters if it is long.
std::string abbreviated(std::string_view text);

/// A JSON value with its name in messages: "folder/tokenizer.json: model.merges[3]". Each reader
/// throws Error with that name if the value is of another kind. The JSON value must outlive it.
class JsonField {
 public:
  JsonField(const nlohmann::json& value, std::string file, std::string name = "")
      : m_value(&value), m_file(std::move(file)), m_name(std::move(name)) {}

  const nlohmann::json& value() const { return *m_value; }
  std::string where() const { return m_name.empty() ? m_file : m_file + ": " + m_name; }
  /// Throws Error "FILE: FIELD: expected EXPECTED, found VALUE".
  [[noreturn]] void fail(std::string_view expected) const;

  /// A member of an object; null stands for an absent one.
  JsonField member(const std::string& key) const;
  /// `value` under the name that member(key) has.
  JsonField named(const nlohmann::json& value, const std::string& key) const;
  /// An element of an array.
  JsonField element(std::size_t index) const;
  /// The number of elements; throws Error if the value is no array.
  std::size_t array_size() const;
  /// Throws Error if the value is no object.
  const JsonField& object() const;
  bool is_null() const { return m_value->is_null(); }

  const std::string& string() const;
  bool boolean(std::optional<bool> fallback = std::nullopt) const;
  /// A whole number in [least, most].
  std::int64_t integer(std::int64_t least = std::numeric_limits<std::int64_t>::min(),
                       std::int64_t most = std::numeric_limits<std::int64_t>::max()) const;
  /// A finite number.
  double number() const;
  /// A number in [least, most].
  double number(double least, double most) const;
  /// A finite number above 0.
  double positive() const;
  TokenId token_id() const;
  void require_null_or_empty_string() const;

 private:
  std::optional<std::int64_t> as_integer() const;

  const nlohmann::json* m_value;
  std::string m_file;
  std::string m_name;
};

}  // namespace kvzap::files
