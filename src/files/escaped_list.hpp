// Lists in a text; a backslash makes a separator part of an entry.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kvzap::files {

/// Returns the parts between separators. A character after a backslash belongs to its part.
/// Backslashes stay, because parts may be split again.
inline std::vector<std::string> split_unescaped(std::string_view text, char separator) {
  std::vector<std::string> parts(1);
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 1 < text.size()) {
      parts.back() += text[i];
      parts.back() += text[++i];
    } else if (text[i] == separator) {
      parts.emplace_back();
    } else {
      parts.back() += text[i];
    }
  }
  return parts;
}

/// Returns `text` without the backslashes before `separators`.
inline std::string without_escapes(std::string_view text, std::string_view separators) {
  std::string plain;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool escapes = text[i] == '\\' && i + 1 < text.size() &&
                         separators.find(text[i + 1]) != std::string_view::npos;
    if (!escapes) plain += text[i];
  }
  return plain;
}

}  // namespace kvzap::files
