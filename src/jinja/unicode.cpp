#include "jinja/unicode.hpp"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>

#include "jinja/search.hpp"

namespace kvzap::jinja {

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

std::int64_t length_of(std::string_view text) {
  return std::count_if(text.begin(), text.end(),
                       [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

std::size_t offset_of(std::string_view text, std::int64_t index) {
  std::size_t offset = 0;
  for (; offset < text.size(); ++offset) {
    const bool begins = (static_cast<unsigned char>(text[offset]) & 0xC0) != 0x80;
    if (begins && index-- == 0) break;
  }
  return offset;
}

bool is_space(std::int32_t c) {
  if (c < 0x80) return c == ' ' || (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x1F);
  return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 ||
         c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool is_letter(std::int32_t c) {
  if (c < 0x80) return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  const auto category = utf8proc_category(c);
  return category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO;
}

bool is_digit(std::int32_t c) {
  if (c < 0x80) return c >= '0' && c <= '9';
  return utf8proc_category(c) == UTF8PROC_CATEGORY_ND;
}

bool is_word(std::int32_t c) {
  if (c < 0x80) return is_letter(c) || is_digit(c) || c == '_';
  const auto category = utf8proc_category(c);
  return is_letter(c) || category == UTF8PROC_CATEGORY_ND || category == UTF8PROC_CATEGORY_NL ||
         category == UTF8PROC_CATEGORY_NO;
}

bool is_upper(std::int32_t c) {
  if (c < 0x80) return c >= 'A' && c <= 'Z';
  return utf8proc_category(c) == UTF8PROC_CATEGORY_LU;
}

bool is_lower(std::int32_t c) {
  if (c < 0x80) return c >= 'a' && c <= 'z';
  return utf8proc_category(c) == UTF8PROC_CATEGORY_LL;
}

std::string_view stripped(std::string_view text, Ends ends,
                          std::optional<std::string_view> characters) {
  std::optional<CharacterSet> set;
  if (characters) set.emplace(*characters);
  const auto is_stripped = [&](std::int32_t character) {
    return set ? set->contains(character) : is_space(character);
  };
  while (ends != Ends::right && !text.empty()) {
    const auto [character, length] = character_at(text, 0);
    if (!is_stripped(character)) break;
    text.remove_prefix(length);
  }
  while (ends != Ends::left && !text.empty()) {
    std::size_t begin = text.size() - 1;
    while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
    if (!is_stripped(character_at(text, begin).first)) break;
    text.remove_suffix(text.size() - begin);
  }
  return text;
}

namespace {

/// Appends `map` of each character; `map` also gets whether the character before it is cased.
template <class Map>
std::string mapped(std::string_view text, const Map& map) {
  std::string result;
  result.reserve(text.size());
  bool follows_cased = false;
  for (std::size_t offset = 0; offset < text.size();) {
    const auto [character, length] = character_at(text, offset);
    append_character(result, map(character, follows_cased, offset == 0));
    follows_cased = is_cased(character);
    offset += length;
  }
  return result;
}

}  // namespace

std::string upper(std::string_view text) {
  return mapped(text, [](auto c, bool, bool) { return utf8proc_toupper(c); });
}
std::string lower(std::string_view text) {
  return mapped(text, [](auto c, bool, bool) { return utf8proc_tolower(c); });
}
std::string capitalized(std::string_view text) {
  return mapped(text, [](auto c, bool, bool is_first) {
    return is_first ? utf8proc_totitle(c) : utf8proc_tolower(c);
  });
}
std::string titled(std::string_view text) {
  return mapped(text, [](auto c, bool follows_cased, bool) {
    return follows_cased ? utf8proc_tolower(c) : utf8proc_totitle(c);
  });
}

namespace {

bool is_printable(std::int32_t c) {
  if (c < 0x80) return c >= ' ' && c < 0x7F;
  const auto category = utf8proc_category(c);
  return category != UTF8PROC_CATEGORY_CN && category < UTF8PROC_CATEGORY_ZS;
}

}  // namespace

std::string quoted_text(std::string_view text) {
  const bool has_single = text.find('\'') != std::string_view::npos;
  const char quote = has_single && text.find('"') == std::string_view::npos ? '"' : '\'';
  std::string result(1, quote);
  for (std::size_t offset = 0; offset < text.size();) {
    const auto [character, length] = character_at(text, offset);
    if (character == quote || character == '\\') {
      result += '\\';
      result += static_cast<char>(character);
    } else if (character == '\n' || character == '\r' || character == '\t') {
      result += character == '\n' ? "\\n" : character == '\r' ? "\\r" : "\\t";
    } else if (is_printable(character)) {
      result.append(text.substr(offset, length));
    } else if (character < 0x100) {
      result += fmt::format("\\x{:02x}", character);
    } else {
      result += character < 0x10000 ? fmt::format("\\u{:04x}", character)
                                    : fmt::format("\\U{:08x}", character);
    }
    offset += length;
  }
  return result + quote;
}

}  // namespace kvzap::jinja
