// What other people's files say, fit to be shown in a message.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace kvzap::detail {

/// `text` with everything in it that a terminal would act upon, or that would end a C string, as
/// an escape: \n, \t, \r, \xNN for other control characters and for bytes that are no UTF-8. A text
/// of more than `max_bytes` ends in "…" where a character ends.
std::string shown(std::string_view text, std::size_t max_bytes = 80);

/// shown(text) between single quotes.
std::string in_quotes(std::string_view text, std::size_t max_bytes = 80);

/// An error's message as a terminal may have it: shown(), but lines stay lines, and of a very long
/// one the beginning.
std::string shown_message(std::string_view message);

}  // namespace kvzap::detail
