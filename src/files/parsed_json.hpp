// JSON that keeps the order of members, from clients: bounded while it is read, and freed without
// taking memory.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>

namespace kvzap::files {

/// Most members of an object in ordered JSON, whose members are found one after the other.
inline constexpr std::size_t most_ordered_members = 1024;

/// Frees the values inside of `value` without taking memory. The library's destructor takes some,
/// and ends the process if there is none.
void free_json(nlohmann::json& value) noexcept;
void free_json(nlohmann::ordered_json& value) noexcept;

/// A value that is freed by free_json, for texts that may use up the memory.
class ParsedJson {
 public:
  explicit ParsedJson(nlohmann::ordered_json value) : m_value(std::move(value)) {}
  ~ParsedJson() { free_json(m_value); }
  ParsedJson(ParsedJson&& other) noexcept : m_value(std::move(other.m_value)) {}
  ParsedJson& operator=(ParsedJson&&) = delete;

  const nlohmann::ordered_json& value() const { return m_value; }
  nlohmann::ordered_json take() { return std::move(m_value); }

 private:
  nlohmann::ordered_json m_value;
};

/// As parse_json, and keeps the order of members. An object with more than most_ordered_members is
/// an error.
nlohmann::ordered_json parse_ordered_json(std::string_view text, const std::string& what);

/// As described(nlohmann::json).
std::string described(const nlohmann::ordered_json& value);

}  // namespace kvzap::files
