// Frees values of JSON without taking memory.
#pragma once

#include <nlohmann/json.hpp>
#include <utility>

namespace kvzap::files {

/// Frees the values inside of `value` without taking memory. The library's destructor takes some,
/// and ends the process if there is none.
void free_json(nlohmann::json& value) noexcept;

/// A value that is freed by free_json, for texts that may use up the memory.
class ParsedJson {
 public:
  explicit ParsedJson(nlohmann::json value) : m_value(std::move(value)) {}
  ~ParsedJson() { free_json(m_value); }
  ParsedJson(ParsedJson&& other) noexcept : m_value(std::move(other.m_value)) {}
  ParsedJson& operator=(ParsedJson&&) = delete;

  const nlohmann::json& value() const { return m_value; }

 private:
  nlohmann::json m_value;
};

}  // namespace kvzap::files
