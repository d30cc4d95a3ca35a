// Well-formed and ill-formed UTF-8, and the properties of characters that the tokenizer needs.
#pragma once

#include <utf8proc.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

namespace kvzap::text {

/// Appends bytes to text, with U+FFFD for ill-formed parts. Unless this is the end of the input, an
/// incomplete last character is not consumed. Returns the number of bytes consumed.
std::size_t append_lossy(std::string& text, std::string_view bytes, bool at_end);

bool is_valid_utf8(std::string_view bytes);

/// Returns the first (last) character of valid UTF-8 (not empty) and its length in bytes.
std::pair<utf8proc_int32_t, std::size_t> first_character(std::string_view text);
std::pair<utf8proc_int32_t, std::size_t> last_character(std::string_view text);

void append_utf8(std::string& text, utf8proc_int32_t codepoint);

/// Unicode's White_Space property.
bool is_white_space(utf8proc_int32_t c);

/// Unicode's \w (UTS #18): Alphabetic, marks, decimal numbers, connectors, join controls.
bool is_word(utf8proc_int32_t c);

/// Unicode's categories N (numbers).
bool is_numeric(utf8proc_int32_t c);

/// Unicode's categories P (punctuation), and the symbols of ASCII.
bool is_punctuation(utf8proc_int32_t c);

/// Unicode's categories Cc, Cf and Co (control, format, private use).
bool is_control(utf8proc_int32_t c);

/// Unicode's categories M (marks).
bool is_mark(utf8proc_int32_t c);

/// Returns valid UTF-8 in lower case, character by character (a final sigma is no special case).
std::string lowercase(std::string_view text);

/// Unicode's normal forms C, D, KC and KD.
enum class NormalForm { c, d, kc, kd };

/// Returns a normal form of valid UTF-8.
std::string normalize(std::string_view text, NormalForm form);

}  // namespace kvzap::text
