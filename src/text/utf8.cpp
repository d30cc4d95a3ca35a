#include "text/utf8.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <vector>

namespace kvzap::text {
namespace {

constexpr std::string_view replacement_character = "\xEF\xBF\xBD";

struct Utf8Step {
  std::size_t length;
  enum { valid, invalid, truncated } status;
};

// Reads the character that bytes (not empty) starts with, or the maximal subpart of an ill-formed
// one (Unicode's table 3-7). `truncated`: an ill-formed subpart that more bytes could complete.
Utf8Step utf8_step(std::string_view bytes) {
  const auto at = [&](std::size_t i) { return static_cast<unsigned char>(bytes[i]); };
  const unsigned char lead = at(0);
  std::size_t length = 0;
  unsigned char low = 0x80, high = 0xBF;
  if (lead < 0x80) {
    return {1, Utf8Step::valid};
  } else if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return {1, Utf8Step::invalid};
  }
  for (std::size_t i = 1; i < length; ++i) {
    if (i == bytes.size()) return {i, Utf8Step::truncated};
    if (at(i) < low || at(i) > high) return {i, Utf8Step::invalid};
    low = 0x80;
    high = 0xBF;
  }
  return {length, Utf8Step::valid};
}

// Returns the number of ASCII characters at the beginning, most of them eight at a time.
std::size_t ascii_prefix(std::string_view bytes) {
  std::size_t count = 0;
  for (std::uint64_t word = 0; count + sizeof(word) <= bytes.size(); count += sizeof(word)) {
    std::memcpy(&word, bytes.data() + count, sizeof(word));
    if ((word & 0x8080808080808080u) != 0) break;
  }
  while (count < bytes.size() && static_cast<unsigned char>(bytes[count]) < 0x80) ++count;
  return count;
}

/// Characters from `first` to `last`.
struct Range {
  utf8proc_int32_t first, last;
};

// Common scripts and symbols that NFC neither changes nor reorders, and that do not compose with
// the character before them. A test checks every character.
constexpr Range stable_in_nfc[] = {
    {0x0000, 0x02FF},   // Latin
    {0x0391, 0x03FF},   // Greek
    {0x0400, 0x0482},   // Cyrillic
    {0x2010, 0x205E},   // punctuation
    {0x20A0, 0x20BF},   // currencies
    {0x2190, 0x2328},   // arrows, operators
    {0x2400, 0x2ADB},   // boxes, shapes, dingbats, operators
    {0x3001, 0x3029},   // CJK punctuation
    {0x3041, 0x3096},   // Hiragana
    {0x30A0, 0x30FF},   // Katakana
    {0x3400, 0x9FFF},   // CJK ideographs
    {0xAC00, 0xD7A3},   // Hangul syllables
    {0xFF00, 0xFFEF},   // full width
    {0x1F000, 0x1FAFF}  // emoji
};

bool is_stable(utf8proc_int32_t c, NormalForm form) {
  if (form != NormalForm::c) return c < 0x80;
  const Range* const range =
      std::find_if(std::begin(stable_in_nfc), std::end(stable_in_nfc),
                   [c](const Range& candidate) { return c <= candidate.last; });
  return range != std::end(stable_in_nfc) && c >= range->first;
}

// Returns the end of the run of stable characters that starts at `position`.
std::size_t stable_run(std::string_view text, std::size_t position, NormalForm form) {
  while (true) {
    position += ascii_prefix(text.substr(position));
    if (position == text.size()) return position;
    const auto [c, length] = first_character(text.substr(position));
    if (!is_stable(c, form)) return position;
    position += length;
  }
}

// utf8proc_map would do all of this, but it sorts marks into canonical order in quadratic time on
// long runs of them.
void append_normalized(std::string& result, std::string_view text, NormalForm form) {
  const bool composes = form == NormalForm::c || form == NormalForm::kc;
  const bool compatible = form == NormalForm::kc || form == NormalForm::kd;
  const auto options = static_cast<utf8proc_option_t>(
      UTF8PROC_STABLE | (composes ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) |
      (compatible ? UTF8PROC_COMPAT : 0));
  std::vector<utf8proc_int32_t> codepoints;
  codepoints.reserve(text.size());
  for (std::size_t position = 0; position < text.size();) {
    const auto [codepoint, length] = first_character(text.substr(position));
    position += length;
    // No decomposition is longer than 18 characters (U+FDFA).
    std::array<utf8proc_int32_t, 32> decomposition{};
    int boundary_class = 0;
    const auto count = utf8proc_decompose_char(codepoint, decomposition.data(),
                                               decomposition.size(), options, &boundary_class);
    codepoints.insert(codepoints.end(), decomposition.begin(), decomposition.begin() + count);
  }
  const auto combining_class = [](utf8proc_int32_t c) {
    return utf8proc_get_property(c)->combining_class;
  };
  for (auto run = codepoints.begin(); run != codepoints.end();) {
    if (combining_class(*run) == 0) {
      ++run;
      continue;
    }
    const auto end = std::find_if(run, codepoints.end(),
                                  [&](utf8proc_int32_t c) { return combining_class(c) == 0; });
    std::stable_sort(run, end, [&](utf8proc_int32_t a, utf8proc_int32_t b) {
      return combining_class(a) < combining_class(b);
    });
    run = end;
  }
  auto count = static_cast<utf8proc_ssize_t>(codepoints.size());
  if (composes) count = utf8proc_normalize_utf32(codepoints.data(), count, options);
  for (utf8proc_ssize_t i = 0; i < count; ++i) append_utf8(result, codepoints[i]);
}

}  // namespace

std::size_t append_lossy(std::string& text, std::string_view bytes, bool at_end) {
  std::size_t position = 0;
  while (position < bytes.size()) {
    const std::size_t ascii = ascii_prefix(bytes.substr(position));
    text.append(bytes.substr(position, ascii));
    position += ascii;
    if (position == bytes.size()) break;
    const Utf8Step step = utf8_step(bytes.substr(position));
    if (step.status == Utf8Step::truncated && !at_end) break;
    text.append(step.status == Utf8Step::valid ? bytes.substr(position, step.length)
                                               : replacement_character);
    position += step.length;
  }
  return position;
}

bool is_valid_utf8(std::string_view bytes) {
  for (std::size_t position = ascii_prefix(bytes); position < bytes.size();
       position += ascii_prefix(bytes.substr(position))) {
    const Utf8Step step = utf8_step(bytes.substr(position));
    if (step.status != Utf8Step::valid) return false;
    position += step.length;
  }
  return true;
}

std::pair<utf8proc_int32_t, std::size_t> first_character(std::string_view text) {
  utf8proc_int32_t codepoint = 0;
  const auto length = utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                       static_cast<utf8proc_ssize_t>(text.size()), &codepoint);
  return {codepoint, static_cast<std::size_t>(length)};
}

std::pair<utf8proc_int32_t, std::size_t> last_character(std::string_view text) {
  std::size_t start = text.size() - 1;
  while (start > 0 && (static_cast<unsigned char>(text[start]) & 0xC0) == 0x80) --start;
  return first_character(text.substr(start));
}

void append_utf8(std::string& text, utf8proc_int32_t codepoint) {
  std::array<utf8proc_uint8_t, 4> bytes{};
  const auto length = utf8proc_encode_char(codepoint, bytes.data());
  text.append(reinterpret_cast<const char*>(bytes.data()), static_cast<std::size_t>(length));
}

bool is_white_space(utf8proc_int32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

bool is_word(utf8proc_int32_t c) {
  switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      // Join controls, and the circled and squared letters, which are Alphabetic symbols.
      return c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) ||
             (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
             (c >= 0x1F170 && c <= 0x1F189);
  }
}

bool is_numeric(utf8proc_int32_t c) {
  const auto category = utf8proc_category(c);
  return category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO;
}

bool is_punctuation(utf8proc_int32_t c) {
  if (c < 0x80) {
    return (c >= 0x21 && c <= 0x2F) || (c >= 0x3A && c <= 0x40) || (c >= 0x5B && c <= 0x60) ||
           (c >= 0x7B && c <= 0x7E);
  }
  const auto category = utf8proc_category(c);
  return category >= UTF8PROC_CATEGORY_PC && category <= UTF8PROC_CATEGORY_PO;
}

bool is_control(utf8proc_int32_t c) {
  const auto category = utf8proc_category(c);
  return category == UTF8PROC_CATEGORY_CC || category == UTF8PROC_CATEGORY_CF ||
         category == UTF8PROC_CATEGORY_CO;
}

bool is_mark(utf8proc_int32_t c) {
  const auto category = utf8proc_category(c);
  return category >= UTF8PROC_CATEGORY_MN && category <= UTF8PROC_CATEGORY_ME;
}

std::string lowercase(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  for (std::size_t position = 0; position < text.size();) {
    const auto [c, length] = first_character(text.substr(position));
    position += length;
    if (c == 0x130) {  // the one character whose lower case has two
      result += "i\u0307";
    } else {
      append_utf8(result, utf8proc_tolower(c));
    }
  }
  return result;
}

std::string normalize(std::string_view text, NormalForm form) {
  // Runs of stable characters stay as they are. Another character may compose with the one before
  // it, so the last stable character is normalized with the others. Canonical order ends at it,
  // too.
  std::string result;
  result.reserve(text.size());
  std::size_t copied = 0;
  std::size_t stable_end = stable_run(text, 0, form);
  while (stable_end < text.size()) {
    const std::string_view stable = text.substr(copied, stable_end - copied);
    const std::size_t base = stable_end - (stable.empty() ? 0 : last_character(stable).second);
    result.append(text.substr(copied, base - copied));
    copied = stable_end;
    do {
      copied += first_character(text.substr(copied)).second;
      stable_end = stable_run(text, copied, form);
    } while (stable_end == copied && copied < text.size());
    append_normalized(result, text.substr(base, copied - base), form);
  }
  return result.append(text.substr(copied));
}

}  // namespace kvzap::text
