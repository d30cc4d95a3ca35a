// Makes untrusted text safe for messages.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap::files {

/// Returns the bytes of the well-formed UTF-8 character that `text` (not empty) begins with; 0 if
/// there is none.
std::size_t utf8_character_bytes(std::string_view text);

/// Returns the position of the first byte that does not belong to well-formed UTF-8, or npos.
std::size_t first_not_utf8(std::string_view text);

/// Returns whether `text` is well-formed UTF-8.
inline bool is_utf8(std::string_view text) { return first_not_utf8(text) == text.npos; }

/// Returns `text` with escapes for all characters that a terminal would act on or that would end a
/// C string. The escapes are \n, \t, \r, and \xNN for other control characters and for bytes that
/// are not UTF-8. A text of more than `max_bytes` is cut at a character and ends in "…".
std::string shown(std::string_view text, std::size_t max_bytes = 80);

/// Returns shown(text) in single quotes.
std::string in_quotes(std::string_view text, std::size_t max_bytes = 80);

/// Returns `word` as a shell reads it: quoted if it has other characters than names of files and
/// options, without line breaks or control characters. A very long word ends in "…".
std::string shell_quoted(std::string_view word);

/// Returns an error's message as shown(), but keeps line breaks, and cuts a very long message.
std::string shown_message(std::string_view message);

/// Returns "a, b or c", for what a message expects.
std::string alternatives(const std::vector<std::string_view>& names);

}  // namespace kvzap::files
