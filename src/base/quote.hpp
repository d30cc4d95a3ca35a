// Makes untrusted text safe for messages.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap::base {

/// Returns whether `text` is well-formed UTF-8.
bool is_utf8(std::string_view text);

/// Returns `text` with escapes for all characters that a terminal would act on or that would end a
/// C string. The escapes are \n, \t, \r, and \xNN for other control characters and for bytes that
/// are not UTF-8. A text of more than `max_bytes` is cut at a character and ends in "…".
std::string shown(std::string_view text, std::size_t max_bytes = 80);

/// Returns shown(text) in single quotes.
std::string in_quotes(std::string_view text, std::size_t max_bytes = 80);

/// Returns an error's message as shown(), but keeps line breaks, and cuts a very long message.
std::string shown_message(std::string_view message);

/// Returns "a, b or c", for what a message expects.
std::string alternatives(const std::vector<std::string_view>& names);

}  // namespace kvzap::base
