#include "jinja/unicode.hpp"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <set>

#include "jinja/value.hpp"

namespace kvzap::jinja {
namespace {

inline bool begins_character(char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }

/// Returns whether no character has the case `other`, and one has a case.
bool is_all(std::string_view text, bool (*other)(std::int32_t)) {
  bool found = false;
  for (const auto& [character, bytes] : Characters(text)) {
    if (other(character)) return false;
    found |= is_cased(character);
  }
  return found;
}

/// Appends `map` of each character, which also gets the character before it, or -1.
template <class Map>
std::string mapped(std::string_view text, const Map& map) {
  std::string result;
  result.reserve(text.size());
  std::int32_t previous = -1;
  for (const auto& [character, bytes] : Characters(text)) {
    append_character(result, map(character, previous));
    previous = character;
  }
  return result;
}

}  // namespace

std::pair<std::int32_t, std::size_t> character_at(std::string_view text, std::size_t offset) {
  const auto lead = static_cast<unsigned char>(text[offset]);
  if (lead < 0x80) return {lead, 1};
  utf8proc_int32_t character = 0;
  const auto length =
      utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data() + offset),
                       static_cast<utf8proc_ssize_t>(text.size() - offset), &character);
  if (length <= 0) return {0xFFFD, 1};
  return {character, static_cast<std::size_t>(length)};
}

void append_character(std::string& text, std::int32_t character) {
  std::array<utf8proc_uint8_t, 4> bytes{};
  const auto length = utf8proc_encode_char(character, bytes.data());
  text.append(reinterpret_cast<const char*>(bytes.data()), static_cast<std::size_t>(length));
}

std::size_t find_text(std::string_view text, std::string_view wanted, std::size_t from,
                      Meter& meter) {
  meter.step();
  if (from > text.size() || wanted.size() > text.size() - from) return std::string_view::npos;
  // Unlike std::string_view::find, this never compares the whole text at each place.
  const void* const found =
      memmem(text.data() + from, text.size() - from, wanted.data(), wanted.size());
  const std::size_t place =
      found == nullptr ? text.size()
                       : static_cast<std::size_t>(static_cast<const char*>(found) - text.data());
  meter.step(static_cast<std::int64_t>((place - from) / 64));
  return found == nullptr ? std::string_view::npos : place;
}

std::int64_t length_of(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return begins_character(c); });
}

std::size_t offset_of(std::string_view text, std::int64_t index) {
  std::size_t offset = 0;
  for (; offset < text.size(); ++offset) {
    if (begins_character(text[offset]) && index-- == 0) break;
  }
  return offset;
}

int digit_value(char c) {
  const char lower_case = static_cast<char>(c | 0x20);
  return c >= '0' && c <= '9'                     ? c - '0'
         : lower_case >= 'a' && lower_case <= 'z' ? lower_case - 'a' + 10
                                                  : 99;
}

bool is_space(std::int32_t c) {
  if (c < 0x80) return c == ' ' || (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x1F);
  return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 ||
         c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool is_letter(std::int32_t c) {
  const auto category = utf8proc_category(c);
  return category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO;
}
bool is_digit(std::int32_t c) { return utf8proc_category(c) == UTF8PROC_CATEGORY_ND; }
bool is_upper(std::int32_t c) { return utf8proc_category(c) == UTF8PROC_CATEGORY_LU; }
bool is_lower(std::int32_t c) { return utf8proc_category(c) == UTF8PROC_CATEGORY_LL; }
bool is_word(std::int32_t c) {
  const auto category = utf8proc_category(c);
  const bool is_number = category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO;
  return c == '_' || is_number || is_letter(c);
}

std::string_view stripped(std::string_view text, Ends ends,
                          std::optional<std::string_view> characters) {
  std::set<std::int32_t> set;
  for (const auto& [character, bytes] : Characters(characters.value_or(""))) set.insert(character);
  const auto is_stripped = [&](std::int32_t character) {
    return characters ? set.count(character) > 0 : is_space(character);
  };
  while (ends != Ends::right && !text.empty()) {
    const auto [character, length] = character_at(text, 0);
    if (!is_stripped(character)) break;
    text.remove_prefix(length);
  }
  while (ends != Ends::left && !text.empty()) {
    std::size_t begin = text.size() - 1;
    while (begin > 0 && !begins_character(text[begin])) --begin;
    if (!is_stripped(character_at(text, begin).first)) break;
    text.remove_suffix(text.size() - begin);
  }
  return text;
}

bool is_all_upper(std::string_view text) { return is_all(text, is_lower); }
bool is_all_lower(std::string_view text) { return is_all(text, is_upper); }

std::string upper(std::string_view text) {
  return mapped(text, [](auto c, auto) { return utf8proc_toupper(c); });
}
std::string lower(std::string_view text) {
  return mapped(text, [](auto c, auto) { return utf8proc_tolower(c); });
}
std::string capitalized(std::string_view text) {
  return mapped(text, [](auto c, auto previous) {
    return previous < 0 ? utf8proc_totitle(c) : utf8proc_tolower(c);
  });
}
std::string titled(std::string_view text) {
  return mapped(text, [](auto c, auto previous) {
    return is_cased(previous) ? utf8proc_tolower(c) : utf8proc_totitle(c);
  });
}

std::string quoted_text(std::string_view text) {
  const bool has_single = text.find('\'') != std::string_view::npos;
  const char quote = has_single && text.find('"') == std::string_view::npos ? '"' : '\'';
  std::string result(1, quote);
  for (const auto& [character, bytes] : Characters(text)) {
    const auto category = utf8proc_category(character);
    if (character == quote || character == '\\') {
      result.append("\\").append(bytes);
    } else if (character == '\n' || character == '\r' || character == '\t') {
      result += character == '\n' ? "\\n" : character == '\r' ? "\\r" : "\\t";
    } else if (character == ' ' ||
               (category != UTF8PROC_CATEGORY_CN && category < UTF8PROC_CATEGORY_ZS)) {
      result += bytes;
    } else {
      const char* const escape = character < 0x100     ? "\\x{:02x}"
                                 : character < 0x10000 ? "\\u{:04x}"
                                                       : "\\U{:08x}";
      result += fmt::format(fmt::runtime(escape), character);
    }
  }
  return result + quote;
}

}  // namespace kvzap::jinja
