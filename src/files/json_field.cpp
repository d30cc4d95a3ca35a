#include "files/json_field.hpp"

#include <fmt/format.h>

#include <cmath>

#include "files/json_file.hpp"
#include "files/quote.hpp"

namespace kvzap::files {
namespace {

// JsonField::member of an object without that member.
const nlohmann::json absent;

}  // namespace

void throw_unexpected(const std::string& where, std::string_view expected, std::string_view found) {
  throw Error(fmt::format("{}: expected {}, found {}", where, expected, found));
}

std::string abbreviated(std::string_view text) { return "\"" + shown(text) + "\""; }

void JsonField::fail(std::string_view expected) const {
  throw_unexpected(where(), expected, m_value == &absent ? "none" : described(*m_value));
}

JsonField JsonField::member(const std::string& key) const {
  const auto found = object().value().find(key);
  return named(found == m_value->end() ? absent : *found, key);
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

const JsonField& JsonField::object() const {
  if (!m_value->is_object()) fail("an object");
  return *this;
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

std::optional<std::int64_t> JsonField::as_integer() const {
  if (!m_value->is_number_integer()) return std::nullopt;
  // The library reads unsigned values above this as negative numbers.
  constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (m_value->is_number_unsigned() && m_value->get<std::uint64_t>() > most) return std::nullopt;
  return m_value->get<std::int64_t>();
}

std::int64_t JsonField::integer(std::int64_t least, std::int64_t most) const {
  const auto value = as_integer();
  if (value && *value >= least && *value <= most) return *value;
  using Limits = std::numeric_limits<std::int64_t>;
  if (most < Limits::max()) fail(fmt::format("a whole number from {} to {}", least, most));
  if (least > Limits::min()) fail(fmt::format("a whole number from {}", least));
  fail("a whole number");
}

double JsonField::number() const {
  if (!m_value->is_number() || !std::isfinite(m_value->get<double>())) fail("a number");
  return m_value->get<double>();
}

double JsonField::number(double least, double most) const {
  // Written so that NaN does not pass.
  if (!m_value->is_number() || !(m_value->get<double>() >= least) ||
      !(m_value->get<double>() <= most)) {
    fail(fmt::format("a number from {} to {}", least, most));
  }
  return m_value->get<double>();
}

double JsonField::positive() const {
  if (!m_value->is_number() || !std::isfinite(m_value->get<double>()) ||
      !(m_value->get<double>() > 0)) {
    fail("a number above 0");
  }
  return m_value->get<double>();
}

TokenId JsonField::token_id() const {
  const auto id = as_integer();
  if (!id || *id < 0 || *id > std::numeric_limits<TokenId>::max()) {
    fail("a token id from 0 to 2147483647");
  }
  return static_cast<TokenId>(*id);
}

void JsonField::require_null_or_empty_string() const {
  if (!is_null() && !string().empty()) fail("null or \"\"");
}

}  // namespace kvzap::files
