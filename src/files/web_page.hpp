// Downloads that are a web page instead of the file.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>

#include "files/ascii.hpp"
#include "files/plain_text.hpp"

namespace kvzap::files {

/// Returns whether a file that begins with `bytes` is HTML.
inline bool is_web_page(std::string_view bytes) {
  constexpr std::string_view mark = "\xEF\xBB\xBF";
  if (bytes.substr(0, mark.size()) == mark) bytes.remove_prefix(mark.size());
  bytes.remove_prefix(std::min(bytes.find_first_not_of(" \t\r\n"), bytes.size()));
  const std::string begin = lower_case(bytes.substr(0, std::string_view("<!doctype html").size()));
  return begin == "<!doctype html" || begin.rfind("<html", 0) == 0;
}

/// As content_of, for files that are no text: they may also be a saved web page.
inline std::optional<FileContent> content_of_download(std::string_view bytes) {
  if (!is_web_page(bytes)) return content_of(bytes);
  return FileContent{"a web page", "download the file itself, such as with hf download"};
}

}  // namespace kvzap::files
