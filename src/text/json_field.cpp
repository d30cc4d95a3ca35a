#include "text/json_field.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <limits>

#include "base/json_file.hpp"
#include "base/quote.hpp"

namespace kvzap::detail {

void throw_unexpected(const std::string& where, std::string_view expected, std::string_view found) {
  throw Error(fmt::format("{}: expected {}, found {}", where, expected, found));
}

std::string abbreviated(std::string_view text) { return "\"" + shown(text) + "\""; }

void JsonField::fail(std::string_view expected) const {
  throw_unexpected(where(), expected, described(*m_value));
}

JsonField JsonField::member(const std::string& key) const {
  static const nlohmann::json null_value;
  if (!m_value->is_object()) fail("an object");
  const auto found = m_value->find(key);
  return named(found == m_value->end() ? null_value : *found, key);
}

JsonField JsonField::named(const nlohmann::json& value, const std::string& key) const {
  return {value, m_file, m_name.empty() ? shown(key) : m_name + "." + shown(key)};
}

JsonField JsonField::element(std::size_t index) const {
  return {(*m_value)[index], m_file, fmt::format("{}[{}]", m_name, index)};
}

std::size_t JsonField::array_size() const {
  if (!m_value->is_array()) fail("an array");
  return m_value->size();
}

const std::string& JsonField::string() const {
  if (!m_value->is_string()) fail("a string");
  return m_value->get_ref<const std::string&>();
}

bool JsonField::boolean(std::optional<bool> fallback) const {
  if (m_value->is_null() && fallback) return *fallback;
  if (!m_value->is_boolean()) fail("true or false");
  return m_value->get<bool>();
}

TokenId JsonField::token_id() const {
  constexpr auto expected = "a token id from 0 to 2147483647";
  if (!m_value->is_number_integer()) fail(expected);
  // An id beyond int64 is unsigned, and negative when read as int64.
  const auto id = m_value->get<std::int64_t>();
  if (id < 0 || id > std::numeric_limits<TokenId>::max()) fail(expected);
  return static_cast<TokenId>(id);
}

void JsonField::require_null_or_empty_string() const {
  if (!is_null() && !string().empty()) fail("null or \"\"");
}

}  // namespace kvzap::detail
