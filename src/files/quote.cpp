#include "files/quote.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace kvzap::files {
namespace {

bool is_continuation(char c) { return (static_cast<unsigned char>(c) & 0xC0u) == 0x80u; }

// Whether `text` begins with a control character of Latin-1's upper half.
bool is_upper_control(std::string_view text) {
  return text.size() > 1 && static_cast<unsigned char>(text[0]) == 0xC2 &&
         static_cast<unsigned char>(text[1]) < 0xA0;
}

}  // namespace

std::size_t utf8_character_bytes(std::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  if (first < 0x80) return 1;
  if (first < 0xC2 || first > 0xF4) return 0;
  const std::size_t length = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  if (text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if (!is_continuation(text[i])) return 0;
  }
  const auto second = static_cast<unsigned char>(text[1]);
  const bool is_overlong = (first == 0xE0 && second < 0xA0) || (first == 0xF0 && second < 0x90);
  const bool is_surrogate = first == 0xED && second > 0x9F;
  const bool is_too_large = first == 0xF4 && second > 0x8F;
  return is_overlong || is_surrogate || is_too_large ? 0 : length;
}

std::size_t first_not_utf8(std::string_view text) {
  std::size_t position = 0;
  while (position < text.size()) {
    const std::size_t length = utf8_character_bytes(text.substr(position));
    if (length == 0) return position;
    position += length;
  }
  return std::string_view::npos;
}

std::string shown(std::string_view text, std::size_t max_bytes) {
  std::string result;
  for (std::size_t i = 0; i < text.size();) {
    const std::string_view rest = text.substr(i);
    const std::size_t length = is_upper_control(rest) ? 0 : utf8_character_bytes(rest);
    if (i + (length == 0 ? 1 : length) > max_bytes) return result + "…";
    const char c = text[i];
    if (length == 1 && c == '\n') {
      result += "\\n";
    } else if (length == 1 && c == '\t') {
      result += "\\t";
    } else if (length == 1 && c == '\r') {
      result += "\\r";
    } else if (length == 0 ||
               (length == 1 && (static_cast<unsigned char>(c) < 0x20 || c == 0x7F))) {
      result += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      result += text.substr(i, length);
    }
    i += length == 0 ? 1 : length;
  }
  return result;
}

std::string in_quotes(std::string_view text, std::size_t max_bytes) {
  return "'" + shown(text, max_bytes) + "'";
}

std::string shell_quoted(std::string_view word) {
  // Longer texts make a line that nobody reads; the user has them anyway.
  constexpr std::size_t most_bytes = 2000;
  const std::string_view plain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-";
  if (!word.empty() && word.size() <= most_bytes &&
      word.find_first_not_of(plain) == std::string_view::npos) {
    return std::string(word);
  }
  if (shown(word, most_bytes) == word) {
    std::string text = "'";
    for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return text + "'";
  }
  // Control characters, in the notation of bash and zsh.
  const bool is_cut = word.size() > most_bytes;
  std::string escaped;
  for (const char c : word.substr(0, most_bytes)) {
    if (c == '\\' || c == '\'') escaped += '\\';
    escaped += c;
  }
  return fmt::format("$'{}{}'", shown(escaped, escaped.size() + 1), is_cut ? "…" : "");
}

std::string shown_message(std::string_view message) {
  constexpr std::size_t max_bytes = 16u << 10;
  std::string result;
  while (true) {
    const std::size_t end = message.find('\n');
    result += shown(message.substr(0, end), max_bytes - std::min(max_bytes, result.size()));
    if (end == message.npos || result.size() >= max_bytes) return result;
    result += '\n';
    message.remove_prefix(end + 1);
  }
}

std::string alternatives(const std::vector<std::string_view>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 < names.size() ? ", " : " or ";
    text += names[i];
  }
  return text;
}

}  // namespace kvzap::files
