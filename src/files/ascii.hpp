// Letters and words of ASCII. Unlike isalpha, toupper and streams, they do not depend on the locale
// of the process.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap::files {

inline bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

inline bool is_letter_or_digit(char c) { return is_letter(c) || (c >= '0' && c <= '9'); }

inline char upper(char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c; }

inline char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

inline std::string lower_case(std::string_view text) {
  std::string result(text);
  std::transform(result.begin(), result.end(), result.begin(), lower);
  return result;
}

/// Returns the parts of `text` between white space.
inline std::vector<std::string_view> words_of(std::string_view text) {
  constexpr std::string_view space = " \t\n\v\f\r";
  std::vector<std::string_view> words;
  for (;;) {
    text.remove_prefix(std::min(text.find_first_not_of(space), text.size()));
    if (text.empty()) return words;
    const std::size_t length = std::min(text.find_first_of(space), text.size());
    words.push_back(text.substr(0, length));
    text.remove_prefix(length);
  }
}

}  // namespace kvzap::files
