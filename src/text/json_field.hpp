// Fields of tokenizer.json, with error messages that name the field.
#pragma once

#include <cstddef>
#include <kvzap/core/types.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace kvzap::detail {

/// Throws Error "where: expected …, found …".
[[noreturn]] void throw_unexpected(const std::string& where, std::string_view expected,
                                   std::string_view found);

/// Returns a text in quotes for messages; a long text is cut.
std::string abbreviated(std::string_view text);

/// A JSON value and its name in messages: "folder/tokenizer.json: model.merges[3]". Each reader
/// throws Error with that name if the value has another type. The value must outlive this object.
class JsonField {
 public:
  JsonField(const nlohmann::json& value, std::string file, std::string name = "")
      : m_value(&value), m_file(std::move(file)), m_name(std::move(name)) {}

  const nlohmann::json& value() const { return *m_value; }
  std::string where() const { return m_name.empty() ? m_file : m_file + ": " + m_name; }
  [[noreturn]] void fail(std::string_view expected) const;

  /// Returns a member of an object; null if it is absent.
  JsonField member(const std::string& key) const;
  JsonField element(std::size_t index) const;
  /// Returns a value that was moved out of this object, with the name that member(key) has.
  JsonField named(const nlohmann::json& value, const std::string& key) const;
  std::size_t array_size() const;
  bool is_null() const { return m_value->is_null(); }

  const std::string& string() const;
  bool boolean(std::optional<bool> fallback = std::nullopt) const;
  TokenId token_id() const;
  void require_null_or_empty_string() const;

 private:
  const nlohmann::json* m_value;
  std::string m_file;
  std::string m_name;
};

}  // namespace kvzap::detail
