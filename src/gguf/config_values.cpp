#include "gguf/config_values.hpp"

#include <fmt/format.h>

namespace kvzap::gguf {

std::string ConfigValues::own(std::string_view key) const {
  return fmt::format("{}.{}", m_architecture.name, key);
}

std::string ConfigValues::read(std::string_view key) {
  m_read.emplace(key);
  return own(key);
}

void ConfigValues::fail(std::string_view key, std::string_view expected,
                        std::string_view found) const {
  metadata().fail(own(key), expected, found);
}

std::optional<std::int64_t> ConfigValues::find_integer(std::string_view key, std::int64_t least,
                                                       std::int64_t most) {
  return metadata().find_integer(read(key), least, most);
}

std::int64_t ConfigValues::integer(std::string_view key, std::int64_t least, std::int64_t most) {
  return metadata().integer(read(key), least, most);
}

std::optional<double> ConfigValues::find_number(std::string_view key) {
  return metadata().find_number(read(key));
}

double ConfigValues::positive(std::string_view key) {
  const auto value = find_number(key);
  if (value && *value > 0) return *value;
  fail(key, "a number above 0", value ? fmt::format("{}", *value) : "none");
}

double ConfigValues::factor(std::string_view key, double absent) {
  const auto value = find_number(key);
  return value && *value != 0 ? *value : absent;
}

std::optional<bool> ConfigValues::find_flag(std::string_view key) {
  return metadata().find_flag(read(key));
}

std::optional<std::string_view> ConfigValues::find_string(std::string_view key) {
  return metadata().find_string(read(key));
}

std::optional<std::int64_t> ConfigValues::find_uniform(std::string_view key, std::int64_t blocks) {
  const MetadataValue* const value = metadata().find(own(key));
  if (value == nullptr || value->type != ValueType::array) return find_integer(key, 1);
  const auto numbers =
      metadata().find_integers(read(key), static_cast<std::uint64_t>(blocks), 1, max_extent);
  for (const std::int64_t number : *numbers) {
    if (number == numbers->front()) continue;
    fail(key, "the same number for all layers", fmt::format("{} and {}", numbers->front(), number));
  }
  return numbers->front();
}

std::int64_t ConfigValues::uniform(std::string_view key, std::int64_t blocks) {
  const auto value = find_uniform(key, blocks);
  if (!value) fail(key, "a whole number above 0", "none");
  return *value;
}

std::optional<std::vector<std::int64_t>> ConfigValues::find_integers(std::string_view key,
                                                                     std::int64_t count) {
  return metadata().find_integers(read(key), static_cast<std::uint64_t>(count), 0, max_extent);
}

std::vector<bool> ConfigValues::flags(std::string_view key, std::int64_t blocks) {
  return metadata().find_flags(read(key), static_cast<std::uint64_t>(blocks)).value();
}

void ConfigValues::require(std::string_view key, std::int64_t value) {
  const auto found = find_integer(key, 0);
  if (!found || *found == value) return;
  fail(key, fmt::format("{}, as the architecture has no other", value), fmt::format("{}", *found));
}

void ConfigValues::require(std::string_view key, bool value) {
  const auto found = find_flag(key);
  if (!found || *found == value) return;
  fail(key, fmt::format("{}, as the architecture has no other", value), fmt::format("{}", *found));
}

}  // namespace kvzap::gguf
