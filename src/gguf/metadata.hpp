// The metadata of a GGUF file: keys with typed values, which stay in the mapped file until they are
// asked for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap::gguf {

/// Types of metadata values, with their numbers in the file.
enum class ValueType : std::uint32_t {
  u8,
  i8,
  u16,
  i16,
  u32,
  i32,
  f32,
  boolean,
  string,
  array,
  u64,
  i64,
  f64
};
constexpr std::uint32_t value_types = 13;

/// Bytes of a value of this type; 0 for strings and arrays.
std::size_t bytes_of(ValueType type);

/// A name for messages: "u32".
std::string_view name_of(ValueType type);

/// A value in the mapped file. Its extent has been checked.
struct MetadataValue {
  ValueType type = ValueType::u8;
  /// Of an array: the type of its elements.
  ValueType element = ValueType::u8;
  /// Of an array: the number of its elements; else 1.
  std::uint64_t count = 1;
  /// The value, or the elements of an array. Each string begins with its length, a u64.
  const std::byte* data = nullptr;
};

/// Strings of an array, one after the other, without copies.
class StringCursor {
 public:
  explicit StringCursor(const MetadataValue& value) : m_next(value.data), m_left(value.count) {}
  std::uint64_t left() const { return m_left; }
  std::string_view next();

 private:
  const std::byte* m_next;
  std::uint64_t m_left;
};

/// The metadata of one file. Its readers throw Error "FILE: KEY: expected …, found …". An optional
/// result is empty if the key is absent.
class Metadata {
 public:
  Metadata() = default;
  explicit Metadata(std::string file) : m_file(std::move(file)) {}

  /// Returns false if the key is already there.
  bool insert(std::string_view key, const MetadataValue& value);

  const std::string& file() const { return m_file; }
  const std::map<std::string, MetadataValue, std::less<>>& values() const { return m_values; }
  const MetadataValue* find(std::string_view key) const;
  bool has(std::string_view key) const { return find(key) != nullptr; }

  /// A whole number in [least, most], of any integer type.
  std::optional<std::int64_t> find_integer(std::string_view key, std::int64_t least,
                                           std::int64_t most) const;
  std::int64_t integer(std::string_view key, std::int64_t least, std::int64_t most) const;
  /// A finite number of any type. An f32 is returned as its shortest decimal number, which is the
  /// number that the model's authors wrote (1e-05, not 9.999999747e-06).
  std::optional<double> find_number(std::string_view key) const;
  std::optional<bool> find_flag(std::string_view key) const;
  /// An array of `count` flags.
  std::optional<std::vector<bool>> find_flags(std::string_view key, std::uint64_t count) const;
  /// Well-formed UTF-8.
  std::optional<std::string_view> find_string(std::string_view key) const;
  std::string_view string(std::string_view key) const;
  /// An array of strings of at most `most` elements.
  std::optional<StringCursor> find_strings(std::string_view key, std::uint64_t most) const;
  /// An array of `count` numbers, of any integer type, in [least, most].
  std::optional<std::vector<std::int64_t>> find_integers(std::string_view key, std::uint64_t count,
                                                         std::int64_t least,
                                                         std::int64_t most) const;
  /// An array of `count` f32 values, none of them NaN.
  std::optional<std::vector<float>> find_floats(std::string_view key, std::uint64_t count) const;

  [[noreturn]] void fail(std::string_view key, std::string_view expected,
                         std::string_view found) const;

 private:
  [[noreturn]] void fail_type(std::string_view key, std::string_view expected,
                              const MetadataValue& value) const;

  std::string m_file;
  std::map<std::string, MetadataValue, std::less<>> m_values;
};

}  // namespace kvzap::gguf
