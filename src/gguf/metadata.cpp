#include "gguf/metadata.hpp"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <kvzap/core/types.hpp>
#include <limits>

#include "files/decimal.hpp"
#include "files/json_field.hpp"
#include "files/quote.hpp"

namespace kvzap::gguf {
namespace {

constexpr std::size_t shown_key_bytes = 200;

template <class T>
T number_at(const std::byte* data) {
  T value;
  std::memcpy(&value, data, sizeof(T));
  return value;
}

/// Returns an integer; nothing for values of other types and those that no int64_t holds.
std::optional<std::int64_t> integer_at(ValueType type, const std::byte* data) {
  switch (type) {
    case ValueType::u8:
      return number_at<std::uint8_t>(data);
    case ValueType::i8:
      return number_at<std::int8_t>(data);
    case ValueType::u16:
      return number_at<std::uint16_t>(data);
    case ValueType::i16:
      return number_at<std::int16_t>(data);
    case ValueType::u32:
      return number_at<std::uint32_t>(data);
    case ValueType::i32:
      return number_at<std::int32_t>(data);
    case ValueType::i64:
      return number_at<std::int64_t>(data);
    case ValueType::u64: {
      const auto value = number_at<std::uint64_t>(data);
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) break;
      return static_cast<std::int64_t>(value);
    }
    default:
      break;
  }
  return std::nullopt;
}

std::string described_integer(ValueType type, const std::byte* data) {
  if (type == ValueType::u64) return fmt::format("{}", number_at<std::uint64_t>(data));
  const auto value = integer_at(type, data);
  return value ? fmt::format("{}", *value) : std::string(name_of(type));
}

std::string whole_number(std::int64_t least, std::int64_t most) {
  return fmt::format("a whole number from {} to {}", least, most);
}

}  // namespace

std::size_t bytes_of(ValueType type) {
  switch (type) {
    case ValueType::u8:
    case ValueType::i8:
    case ValueType::boolean:
      return 1;
    case ValueType::u16:
    case ValueType::i16:
      return 2;
    case ValueType::u32:
    case ValueType::i32:
    case ValueType::f32:
      return 4;
    case ValueType::u64:
    case ValueType::i64:
    case ValueType::f64:
      return 8;
    case ValueType::string:
    case ValueType::array:
      break;
  }
  return 0;
}

std::string_view name_of(ValueType type) {
  static constexpr std::string_view names[] = {"u8",  "i8",  "u16",     "i16",    "u32",
                                               "i32", "f32", "boolean", "string", "array",
                                               "u64", "i64", "f64"};
  return names[static_cast<std::uint32_t>(type)];
}

std::string_view StringCursor::next() {
  const auto length = number_at<std::uint64_t>(m_next);
  const auto* const text = reinterpret_cast<const char*>(m_next + sizeof(length));
  m_next += sizeof(length) + length;
  --m_left;
  return {text, static_cast<std::size_t>(length)};
}

bool Metadata::insert(std::string_view key, const MetadataValue& value) {
  return m_values.emplace(key, value).second;
}

const MetadataValue* Metadata::find(std::string_view key) const {
  const auto found = m_values.find(key);
  return found == m_values.end() ? nullptr : &found->second;
}

void Metadata::fail(std::string_view key, std::string_view expected, std::string_view found) const {
  files::throw_unexpected(fmt::format("{}: {}", m_file, files::shown(key, shown_key_bytes)),
                          expected, found);
}

void Metadata::fail_type(std::string_view key, std::string_view expected,
                         const MetadataValue& value) const {
  fail(key, expected,
       value.type == ValueType::array
           ? fmt::format("an array of {} values of type {}", value.count, name_of(value.element))
           : fmt::format("a value of type {}", name_of(value.type)));
}

std::optional<std::int64_t> Metadata::find_integer(std::string_view key, std::int64_t least,
                                                   std::int64_t most) const {
  const MetadataValue* const value = find(key);
  if (value == nullptr) return std::nullopt;
  const auto number = integer_at(value->type, value->data);
  if (number && *number >= least && *number <= most) return number;
  if (!number && value->type != ValueType::u64) {
    fail_type(key, whole_number(least, most), *value);
  }
  fail(key, whole_number(least, most), described_integer(value->type, value->data));
}

std::int64_t Metadata::integer(std::string_view key, std::int64_t least, std::int64_t most) const {
  const auto value = find_integer(key, least, most);
  if (!value) fail(key, whole_number(least, most), "none");
  return *value;
}

std::optional<double> Metadata::find_number(std::string_view key) const {
  const MetadataValue* const value = find(key);
  if (value == nullptr) return std::nullopt;
  double number = 0;
  if (value->type == ValueType::f32) {
    number = files::decimal_of(number_at<float>(value->data));
  } else if (value->type == ValueType::f64) {
    number = number_at<double>(value->data);
  } else if (const auto whole = integer_at(value->type, value->data)) {
    number = static_cast<double>(*whole);
  } else {
    fail_type(key, "a number", *value);
  }
  if (!std::isfinite(number)) fail(key, "a finite number", fmt::format("{}", number));
  return number;
}

std::optional<bool> Metadata::find_flag(std::string_view key) const {
  const MetadataValue* const value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != ValueType::boolean) fail_type(key, "true or false", *value);
  const auto flag = number_at<std::uint8_t>(value->data);
  if (flag > 1) fail(key, "0 or 1 (false or true)", fmt::format("{}", flag));
  return flag == 1;
}

std::optional<std::vector<bool>> Metadata::find_flags(std::string_view key,
                                                      std::uint64_t count) const {
  const MetadataValue* const value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != ValueType::array || value->element != ValueType::boolean ||
      value->count != count) {
    fail_type(key, fmt::format("an array of {} flags", count), *value);
  }
  std::vector<bool> flags;
  flags.reserve(static_cast<std::size_t>(count));
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto flag = number_at<std::uint8_t>(value->data + i);
    if (flag > 1) {
      fail(fmt::format("{}[{}]", key, i), "0 or 1 (false or true)", fmt::format("{}", flag));
    }
    flags.push_back(flag == 1);
  }
  return flags;
}

std::optional<std::string_view> Metadata::find_string(std::string_view key) const {
  const MetadataValue* const value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != ValueType::string) fail_type(key, "a string", *value);
  const std::string_view text = StringCursor(*value).next();
  if (!files::is_utf8(text)) fail(key, "a text in UTF-8", files::in_quotes(text));
  return text;
}

std::string_view Metadata::string(std::string_view key) const {
  const auto text = find_string(key);
  if (!text) fail(key, "a string", "none");
  return *text;
}

std::optional<StringCursor> Metadata::find_strings(std::string_view key, std::uint64_t most) const {
  const MetadataValue* const value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != ValueType::array || value->element != ValueType::string) {
    fail_type(key, "an array of strings", *value);
  }
  if (value->count > most) {
    fail(key, fmt::format("at most {} strings", most), fmt::format("{}", value->count));
  }
  return StringCursor(*value);
}

std::optional<std::vector<std::int64_t>> Metadata::find_integers(std::string_view key,
                                                                 std::uint64_t count,
                                                                 std::int64_t least,
                                                                 std::int64_t most) const {
  const MetadataValue* const value = find(key);
  if (value == nullptr) return std::nullopt;
  const bool is_integer = value->type == ValueType::array && bytes_of(value->element) > 0 &&
                          value->element != ValueType::f32 && value->element != ValueType::f64 &&
                          value->element != ValueType::boolean;
  if (!is_integer || value->count != count) {
    fail_type(key, fmt::format("an array of {} whole numbers", count), *value);
  }
  std::vector<std::int64_t> numbers;
  numbers.reserve(static_cast<std::size_t>(count));
  const std::byte* data = value->data;
  for (std::uint64_t i = 0; i < count; ++i, data += bytes_of(value->element)) {
    const auto number = integer_at(value->element, data);
    if (!number || *number < least || *number > most) {
      fail(fmt::format("{}[{}]", key, i), whole_number(least, most),
           described_integer(value->element, data));
    }
    numbers.push_back(*number);
  }
  return numbers;
}

std::optional<std::vector<float>> Metadata::find_floats(std::string_view key,
                                                        std::uint64_t count) const {
  const MetadataValue* const value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != ValueType::array || value->element != ValueType::f32 ||
      value->count != count) {
    fail_type(key, fmt::format("an array of {} values of type f32", count), *value);
  }
  std::vector<float> numbers(static_cast<std::size_t>(count));
  if (count > 0) std::memcpy(numbers.data(), value->data, numbers.size() * sizeof(float));
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (std::isnan(numbers[i])) fail(fmt::format("{}[{}]", key, i), "a number", "NaN");
  }
  return numbers;
}

}  // namespace kvzap::gguf
