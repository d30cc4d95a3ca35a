// Strings as Python sees them: UTF-8 whose lengths and positions count code points.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace kvzap::jinja {

class Meter;

/// Returns the code point at byte `offset` (less than the size) and its length in bytes. A byte
/// that begins no valid character is a code point of its own.
std::pair<std::int32_t, std::size_t> character_at(std::string_view text, std::size_t offset);
void append_character(std::string& text, std::int32_t character);

/// The characters of a text with their bytes, for range-based loops.
class Characters {
 public:
  explicit Characters(std::string_view text) : m_rest(text) {}

  Characters begin() const { return *this; }
  Characters end() const { return Characters({}); }
  bool operator!=(const Characters& other) const { return m_rest.size() != other.m_rest.size(); }
  std::pair<std::int32_t, std::string_view> operator*() const {
    const auto [character, length] = character_at(m_rest, 0);
    return {character, m_rest.substr(0, length)};
  }
  void operator++() { m_rest.remove_prefix(character_at(m_rest, 0).second); }

 private:
  std::string_view m_rest;
};

/// Returns the first place of `wanted` in `text` at or behind `from`, or npos. Takes linear time,
/// counted by the meter.
std::size_t find_text(std::string_view text, std::string_view wanted, std::size_t from,
                      Meter& meter);

/// Returns the number of code points.
std::int64_t length_of(std::string_view text);
/// Returns the byte offset of code point `index`, at most the size.
std::size_t offset_of(std::string_view text, std::int64_t index);

/// Returns the value of a digit or letter in bases up to 36; 99 for other characters.
int digit_value(char character);

/// White space of Python's str.isspace().
bool is_space(std::int32_t character);
/// Characters of \w in Python's regular expressions.
bool is_word(std::int32_t character);
bool is_letter(std::int32_t character);
bool is_digit(std::int32_t character);
bool is_upper(std::int32_t character);
bool is_lower(std::int32_t character);
inline bool is_cased(std::int32_t character) { return is_upper(character) || is_lower(character); }

enum class Ends { both, left, right };
/// Returns `text` without the characters `characters` (absent: white space) at its ends.
std::string_view stripped(std::string_view text, Ends ends = Ends::both,
                          std::optional<std::string_view> characters = {});

/// str.isupper() and str.islower().
bool is_all_upper(std::string_view text);
bool is_all_lower(std::string_view text);

/// Case mappings of one character to one: Python's mappings to several (ß to SS) are not applied.
std::string upper(std::string_view text);
std::string lower(std::string_view text);
/// str.capitalize() and str.title().
std::string capitalized(std::string_view text);
std::string titled(std::string_view text);

/// Returns Python's repr() of a string.
std::string quoted_text(std::string_view text);

}  // namespace kvzap::jinja
