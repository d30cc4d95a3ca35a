#include "kvzap/tokenizer.hpp"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <queue>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace kvzap {
namespace {

using Json = nlohmann::json;

// Sequences nest this deep at most, so that a hostile file cannot exhaust the stack.
constexpr int max_nesting = 32;
// Pre-tokens longer than this are not worth remembering; neither are more than so many of them.
constexpr std::size_t max_cached_bytes = 256;
constexpr std::size_t max_cached_pre_tokens = 100000;

// ---- UTF-8 --------------------------------------------------------------------------------------

constexpr std::string_view replacement_character = "\xEF\xBF\xBD";

struct Utf8Step {
  std::size_t length;
  enum { valid, invalid, truncated } status;
};

// The character, or the maximal subpart of an ill-formed one, that bytes (not empty) starts with:
// Unicode's table 3-7. `truncated` is an ill-formed subpart that more bytes could complete.
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

// Appends bytes to text with U+FFFD for what is ill-formed. Unless this is the end of the input, an
// incomplete last character is left alone. Returns the number of bytes consumed.
std::size_t append_lossy(std::string& text, std::string_view bytes, bool at_end) {
  std::size_t position = 0;
  while (position < bytes.size()) {
    const Utf8Step step = utf8_step(bytes.substr(position));
    if (step.status == Utf8Step::truncated && !at_end) break;
    text.append(step.status == Utf8Step::valid ? bytes.substr(position, step.length)
                                               : replacement_character);
    position += step.length;
  }
  return position;
}

bool is_valid_utf8(std::string_view bytes) {
  for (std::size_t position = 0; position < bytes.size();) {
    const Utf8Step step = utf8_step(bytes.substr(position));
    if (step.status != Utf8Step::valid) return false;
    position += step.length;
  }
  return true;
}

// First character of valid UTF-8 (not empty) and its length in bytes.
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

// Unicode's White_Space property.
bool is_white_space(utf8proc_int32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

// Unicode's \w (UTS #18): Alphabetic, marks, decimal numbers, connectors, join controls.
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
      // Join controls and the circled and squared letters, which are Alphabetic symbols.
      return c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) ||
             (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
             (c >= 0x1F170 && c <= 0x1F189);
  }
}

// Normal form C of valid UTF-8. utf8proc_map would do it all, but puts marks in canonical order by
// a sort that takes quadratic time on long runs of them.
std::string normalize_nfc(std::string_view text) {
  if (std::all_of(text.begin(), text.end(),
                  [](char c) { return static_cast<unsigned char>(c) < 0x80; })) {
    return std::string(text);
  }
  constexpr auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
  std::vector<utf8proc_int32_t> codepoints;
  codepoints.reserve(text.size());
  for (std::size_t position = 0; position < text.size();) {
    const auto [codepoint, length] = first_character(text.substr(position));
    position += length;
    // No canonical decomposition is longer than 4 characters.
    std::array<utf8proc_int32_t, 8> decomposition{};
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
  const auto count = utf8proc_normalize_utf32(
      codepoints.data(), static_cast<utf8proc_ssize_t>(codepoints.size()), options);
  std::string result;
  result.reserve(text.size());
  for (utf8proc_ssize_t i = 0; i < count; ++i) append_utf8(result, codepoints[i]);
  return result;
}

// ---- The byte alphabet --------------------------------------------------------------------------

// GPT-2's bijection from bytes to printable characters: Latin-1's printable characters stand for
// themselves, the other 68 bytes for U+0100 and following.
struct ByteAlphabet {
  std::array<std::string, 256> of_byte;
  std::unordered_map<utf8proc_int32_t, unsigned char> byte_of;

  ByteAlphabet() {
    utf8proc_int32_t next = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
      const utf8proc_int32_t c = printable ? byte : next++;
      append_utf8(of_byte[byte], c);
      byte_of.emplace(c, static_cast<unsigned char>(byte));
    }
  }

  // Bytes of a token; a token with characters outside the alphabet stands for itself.
  std::string decode(const std::string& token) const {
    std::string bytes;
    for (std::size_t position = 0; position < token.size();) {
      const auto [codepoint, length] = first_character(std::string_view(token).substr(position));
      const auto found = byte_of.find(codepoint);
      if (found == byte_of.end()) return token;
      bytes.push_back(static_cast<char>(found->second));
      position += length;
    }
    return bytes;
  }
};

const ByteAlphabet& byte_alphabet() {
  static const ByteAlphabet alphabet;
  return alphabet;
}

// ---- JSON with names for what is wrong ----------------------------------------------------------

[[noreturn]] void fail(const std::string& where, std::string_view expected,
                       std::string_view found) {
  throw Error(fmt::format("{}: expected {}, found {}", where, expected, found));
}

std::string abbreviated(std::string_view text) {
  constexpr std::size_t limit = 80;
  if (text.size() <= limit) return fmt::format("\"{}\"", text);
  std::string head;
  append_lossy(head, text.substr(0, limit), false);
  return fmt::format("\"{}...\"", head);
}

std::string describe(const Json& value) {
  if (value.is_string()) return abbreviated(value.get_ref<const std::string&>());
  if (value.is_number() || value.is_boolean() || value.is_null()) return value.dump();
  if (value.is_array()) return fmt::format("an array of {}", value.size());
  return "an object";
}

// A JSON value and how to call it in messages: "folder/tokenizer.json: model.merges[3]".
class Field {
 public:
  Field(const Json& value, std::string file, std::string name)
      : m_value(&value), m_file(std::move(file)), m_name(std::move(name)) {}

  const Json& value() const { return *m_value; }
  std::string where() const { return m_name.empty() ? m_file : m_file + ": " + m_name; }
  [[noreturn]] void fail(std::string_view expected) const {
    kvzap::fail(where(), expected, describe(*m_value));
  }

  // A member of an object; null stands for one that is absent.
  Field member(const std::string& key) const {
    static const Json null_value;
    if (!m_value->is_object()) fail("an object");
    const auto found = m_value->find(key);
    return {found == m_value->end() ? null_value : *found, m_file,
            m_name.empty() ? key : m_name + "." + key};
  }
  Field element(std::size_t index) const {
    return {(*m_value)[index], m_file, fmt::format("{}[{}]", m_name, index)};
  }
  std::size_t array_size() const {
    if (!m_value->is_array()) fail("an array");
    return m_value->size();
  }
  bool is_null() const { return m_value->is_null(); }

  const std::string& string() const {
    if (!m_value->is_string()) fail("a string");
    return m_value->get_ref<const std::string&>();
  }
  bool boolean(std::optional<bool> fallback = std::nullopt) const {
    if (m_value->is_null() && fallback) return *fallback;
    if (!m_value->is_boolean()) fail("true or false");
    return m_value->get<bool>();
  }
  TokenId token_id() const {
    constexpr auto expected = "a token id from 0 to 2147483647";
    if (!m_value->is_number_integer()) fail(expected);
    // Beyond int64 the value is unsigned and its int64 reading negative.
    const auto id = m_value->get<std::int64_t>();
    if (id < 0 || id > std::numeric_limits<TokenId>::max()) fail(expected);
    return static_cast<TokenId>(id);
  }
  void require_null_or_empty_string() const {
    if (!is_null() && !string().empty()) fail("null or \"\"");
  }

 private:
  const Json* m_value;
  std::string m_file;
  std::string m_name;
};

// ---- Regular expressions ------------------------------------------------------------------------

// White_Space and its complement as the inside of a PCRE2 class: under UCP, PCRE2's own \s also
// matches U+180E. Both end with a range, after which a hyphen is literal as it is after \s.
constexpr std::string_view space_set =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{2000}-\x{200a})";
constexpr std::string_view not_space_set =
    R"(\x{0}-\x{8}\x{e}-\x{1f}\x{21}-\x{84}\x{86}-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff})"
    R"(\x{200b}-\x{2027}\x{202a}-\x{202e}\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{10ffff})";

// Rewrites a pattern of Oniguruma (Ruby syntax, what the tokenizers library uses) so that PCRE2
// takes it for the same thing. What the two read differently and no published tokenizer needs is
// refused: better no tokenizer than one that splits differently.
class PatternTranslator {
 public:
  explicit PatternTranslator(const Field& field) : m_field(field), m_pattern(field.string()) {}

  std::string translate() {
    while (m_position < m_pattern.size()) {
      const char c = m_pattern[m_position];
      if (c == '\\') {
        escape(false);
      } else if (c == '[') {
        character_class();
      } else if (c == '(') {
        group();
      } else if (c == '{') {
        interval();
      } else {
        copy(1);
      }
    }
    return m_result;
  }

 private:
  [[noreturn]] void refuse(std::string_view construct) const {
    fail(m_field.where(), "a regular expression in the supported syntax",
         fmt::format("{} in {}", construct, abbreviated(m_pattern)));
  }
  std::string_view rest() const { return std::string_view(m_pattern).substr(m_position); }
  bool at(std::string_view text) const { return rest().substr(0, text.size()) == text; }
  void copy(std::size_t count) {
    m_result.append(rest().substr(0, count));
    m_position += count;
  }
  void replace(std::size_t count, std::string_view text) {
    m_result.append(text);
    m_position += count;
  }

  void escape(bool in_class) {
    if (rest().size() < 2) refuse("a final backslash");
    const char c = m_pattern[m_position + 1];
    switch (c) {
      case 's':
      case 'S': {
        const std::string_view set = c == 's' ? space_set : not_space_set;
        return replace(2, in_class ? std::string(set) : fmt::format("[{}]", set));
      }
      case 'd':
        return replace(2, "\\p{Nd}");
      case 'D':
        return replace(2, "\\P{Nd}");
      case 'v':  // the vertical tab; for PCRE2 it is a class
        return replace(2, "\\x{b}");
      case 'p':
      case 'P':
        return property();
      case 'u':
      case 'x':
        return hexadecimal();
      case 'r':
      case 'n':
      case 't':
      case 'f':
      case 'a':
      case 'e':
        return copy(2);
      default:
        if ((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) {
          refuse(fmt::format("\\{}", c));
        }
        // The escaped character may be of several bytes; the others follow as ordinary ones.
        return copy(2);
    }
  }

  // \p{L}, \p{Lu}, \p{^L}, \p{Han}. A script means its Script property, which PCRE2 10.40 and newer
  // must be told; before, it knew no other.
  void property() {
    const std::size_t end = rest().find('}');
    if (rest().size() < 3 || rest()[2] != '{' || end == std::string_view::npos) {
      refuse("a malformed \\p");
    }
    std::string name(rest().substr(3, end - 3));
    const bool negated = !name.empty() && name[0] == '^';
    if (negated) name.erase(0, 1);
    for (const char c : name) {
      if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_')) {
        refuse(fmt::format("\\p{{{}}}", name));
      }
    }
    static const std::unordered_set<std::string> categories = {
        "L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc", "Me", "N",  "Nd",
        "Nl", "No", "P",  "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S",  "Sm",
        "Sc", "Sk", "So", "Z",  "Zs", "Zl", "Zp", "C",  "Cc", "Cf", "Co", "Cn"};
    if (categories.count(name) == 0) {
#if PCRE2_MAJOR > 10 || PCRE2_MINOR >= 40
      name = "sc:" + name;
#endif
    }
    const char letter = m_pattern[m_position + 1];
    replace(end + 1, fmt::format("\\{}{{{}{}}}", letter, negated ? "^" : "", name));
  }

  // \x{...}, \xHH and \uHHHH.
  void hexadecimal() {
    const bool braces = at("\\x{");
    std::size_t begin = braces ? 3 : 2;
    const std::size_t most = braces ? 8 : (at("\\u") ? 4 : 2);
    std::size_t end = begin;
    const auto is_digit = [&](char c) {
      return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
    };
    while (end < rest().size() && end - begin < most && is_digit(rest()[end])) ++end;
    const bool complete =
        braces ? end > begin && end < rest().size() && rest()[end] == '}' : end - begin == most;
    if (!complete) refuse("a malformed \\x or \\u");
    // Without braces, Oniguruma's \x80 and above are bytes, not characters.
    if (at("\\x") && !braces && rest()[begin] >= '8') refuse("\\x with a byte above 7f");
    const std::string digits(rest().substr(begin, end - begin));
    replace(end + (braces ? 1 : 0), fmt::format("\\x{{{}}}", digits));
  }

  void character_class() {
    copy(1);
    if (at("^")) copy(1);
    if (at("]")) refuse("a class that starts with ]");
    while (!at("]")) {
      if (rest().empty()) refuse("an unclosed class");
      if (at("[")) refuse("a class within a class");
      if (at("&&")) refuse("an intersection of classes");
      if (at("\\")) {
        escape(true);
      } else {
        copy(1);
      }
    }
    copy(1);
  }

  void group() {
    if (!at("(?")) {
      if (at("(*")) refuse("a verb");
      return copy(1);
    }
    for (const std::string_view opening : {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:"}) {
      if (at(opening)) return copy(opening.size());
    }
    // Elsewhere than at the start, the reach of (?i) differs across the alternatives.
    if (m_position == 0 && at("(?i)")) return copy(4);
    refuse(fmt::format("the group {}", rest().substr(0, 4)));
  }

  // {n}, {n,}, {n,m} and Oniguruma's {,m}. A + after one makes it possessive for PCRE2 but repeats
  // it for Oniguruma; a ? after {n} makes it optional for Oniguruma.
  void interval() {
    const std::size_t end = rest().find('}');
    if (end == std::string_view::npos) refuse("an unclosed {");
    const std::string_view body = rest().substr(1, end - 1);
    const std::size_t comma = body.find(',');
    const auto is_number = [](std::string_view digits) {
      return digits.size() <= 5 &&
             std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; });
    };
    const std::string_view low = body.substr(0, comma);
    const bool exact = comma == std::string_view::npos;
    const std::string_view high = exact ? low : body.substr(comma + 1);
    if (!is_number(low) || !is_number(high) || (low.empty() && high.empty())) {
      refuse("a { that is not a repetition");
    }
    const std::string_view after = rest().substr(end + 1, 1);
    if (after == "+" || (after == "?" && exact)) refuse("a modifier after {...}");
    if (low.empty()) return replace(end + 1, fmt::format("{{0,{}}}", high));
    copy(end + 1);
  }

  const Field& m_field;
  const std::string& m_pattern;
  std::size_t m_position = 0;
  std::string m_result;
};

struct Deleter {
  void operator()(pcre2_code* p) const { pcre2_code_free(p); }
  void operator()(pcre2_compile_context* p) const { pcre2_compile_context_free(p); }
  void operator()(pcre2_match_data* p) const { pcre2_match_data_free(p); }
  void operator()(pcre2_match_context* p) const { pcre2_match_context_free(p); }
  void operator()(pcre2_jit_stack* p) const { pcre2_jit_stack_free(p); }
};
template <class T>
using Owned = std::unique_ptr<T, Deleter>;

std::string pcre2_message(int code) {
  std::array<PCRE2_UCHAR, 256> buffer{};
  pcre2_get_error_message(code, buffer.data(), buffer.size());
  return reinterpret_cast<const char*>(buffer.data());
}

struct Match {
  std::size_t begin, end;
  bool is_match;
};

class Pattern {
 public:
  Pattern(const std::string& text, std::uint32_t options, std::string where)
      : m_where(std::move(where)) {
    Owned<pcre2_compile_context> context(pcre2_compile_context_create(nullptr));
    pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
    int code = 0;
    PCRE2_SIZE offset = 0;
    m_code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                               options | PCRE2_UTF | PCRE2_NO_UTF_CHECK, &code, &offset,
                               context.get()));
    if (!m_code) {
      fail(
          m_where, "a regular expression",
          fmt::format("\"{}\" at offset {} of {}", pcre2_message(code), offset, abbreviated(text)));
    }
    // Where there is no just-in-time compiler, PCRE2 interprets.
    pcre2_jit_compile(m_code.get(), PCRE2_JIT_COMPLETE);
  }

  // Cuts text (valid UTF-8) into the matches and what lies between them.
  std::vector<Match> find(std::string_view text) const {
    Owned<pcre2_match_data> data(pcre2_match_data_create_from_pattern(m_code.get(), nullptr));
    Owned<pcre2_match_context> context(pcre2_match_context_create(nullptr));
    Owned<pcre2_jit_stack> stack(pcre2_jit_stack_create(32 << 10, 16 << 20, nullptr));
    pcre2_jit_stack_assign(context.get(), nullptr, stack.get());
    // A run as long as the text is backtracked over once per alternative: no default limit may
    // fail that, but exponential patterns must still end.
    constexpr std::size_t base_limit = 10000000, per_byte = 64, highest = 4000000000u;
    pcre2_set_match_limit(context.get(), static_cast<std::uint32_t>(std::min(
                                             base_limit + per_byte * text.size(), highest)));
    const PCRE2_SIZE* const span = pcre2_get_ovector_pointer(data.get());
    std::vector<Match> pieces;
    std::size_t covered = 0;
    std::size_t position = 0;
    bool any = false;
    while (position <= text.size()) {
      const int code =
          pcre2_match(m_code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                      position, PCRE2_NO_UTF_CHECK, data.get(), context.get());
      if (code == PCRE2_ERROR_NOMATCH) break;
      if (code < 0) {
        fail(m_where, fmt::format("to match a text of {} bytes", text.size()),
             fmt::format("PCRE2's error \"{}\"", pcre2_message(code)));
      }
      const std::size_t begin = span[0], end = span[1];
      if (begin == end && any && end == covered) {
        // An empty match right after the previous one: go on behind the next character.
        if (position == text.size()) break;
        position += first_character(text.substr(position)).second;
        continue;
      }
      if (covered != begin) pieces.push_back({covered, begin, false});
      pieces.push_back({begin, end, true});
      covered = position = end;
      any = true;
    }
    if (covered != text.size()) pieces.push_back({covered, text.size(), false});
    return pieces;
  }

 private:
  std::string m_where;
  Owned<pcre2_code> m_code;
};

Pattern translated_pattern(const Field& field) {
  return {PatternTranslator(field).translate(), PCRE2_UCP | PCRE2_MULTILINE, field.where()};
}

// ---- Pre-tokenizers -----------------------------------------------------------------------------

enum class SplitBehavior { isolated, removed, merged_with_previous, merged_with_next, contiguous };

class Splitter {
 public:
  Splitter(Pattern pattern, SplitBehavior behavior, bool invert)
      : m_pattern(std::move(pattern)), m_behavior(behavior), m_invert(invert) {}

  // Appends the pieces of text to result.
  void split(std::string_view text, std::vector<std::string_view>& result) const {
    std::vector<Match> matches = m_pattern.find(text);
    if (m_invert) {
      for (Match& match : matches) match.is_match = !match.is_match;
    }
    if (m_behavior == SplitBehavior::merged_with_next) {
      std::reverse(matches.begin(), matches.end());
    }
    std::vector<Match> pieces;
    bool previous = false;
    for (const Match& match : matches) {
      const bool merge = m_behavior == SplitBehavior::contiguous
                             ? match.is_match == previous
                             : (m_behavior == SplitBehavior::merged_with_previous ||
                                m_behavior == SplitBehavior::merged_with_next) &&
                                   match.is_match && !previous;
      previous = match.is_match;
      if (m_behavior == SplitBehavior::removed && match.is_match) continue;
      if (merge && !pieces.empty()) {
        pieces.back().begin = std::min(pieces.back().begin, match.begin);
        pieces.back().end = std::max(pieces.back().end, match.end);
      } else {
        pieces.push_back(match);
      }
    }
    if (m_behavior == SplitBehavior::merged_with_next) {
      std::reverse(pieces.begin(), pieces.end());
    }
    for (const Match& piece : pieces) {
      if (piece.begin < piece.end)
        result.push_back(text.substr(piece.begin, piece.end - piece.begin));
    }
  }

 private:
  Pattern m_pattern;
  SplitBehavior m_behavior;
  bool m_invert;
};

SplitBehavior split_behavior(const Field& field) {
  static const std::map<std::string, SplitBehavior> names = {
      {"Isolated", SplitBehavior::isolated},
      {"Removed", SplitBehavior::removed},
      {"MergedWithPrevious", SplitBehavior::merged_with_previous},
      {"MergedWithNext", SplitBehavior::merged_with_next},
      {"Contiguous", SplitBehavior::contiguous}};
  const auto found = names.find(field.string());
  if (found == names.end()) {
    field.fail("Isolated, Removed, MergedWithPrevious, MergedWithNext or Contiguous");
  }
  return found->second;
}

// ---- Added tokens -------------------------------------------------------------------------------

struct AddedToken {
  TokenId id;
  bool single_word, lstrip, rstrip;
};

// Finds added tokens in a text: leftmost first, and of those the longest.
class AddedTokenMatcher {
 public:
  // False if there is a token of this text already.
  bool insert(std::string_view text, const AddedToken& token) {
    std::uint32_t node = 0;
    for (const char c : text) {
      const auto [edge, is_new] = m_edges.try_emplace(key(node, c), m_token_at.size());
      if (is_new) m_token_at.push_back(none);
      node = edge->second;
    }
    if (m_token_at[node] != none) return false;
    m_token_at[node] = m_tokens.size();
    m_tokens.push_back(token);
    m_first[static_cast<unsigned char>(text.front())] = true;
    return true;
  }

  // Calls on_token(id) and on_text(text) in the order of the text.
  template <class OnToken, class OnText>
  void scan(std::string_view text, OnToken on_token, OnText on_text) const {
    std::size_t covered = 0;
    for (std::size_t position = 0; position < text.size();) {
      const auto [token, length] = longest(text, position);
      if (length == 0) {
        ++position;
        continue;
      }
      std::size_t begin = position, end = position + length;
      position = end;
      if (token->single_word &&
          ((begin > 0 && is_word(last_character(text.substr(0, begin)).first)) ||
           (end < text.size() && is_word(first_character(text.substr(end)).first)))) {
        continue;
      }
      if (token->lstrip) {
        while (begin > covered) {
          const auto [c, bytes] = last_character(text.substr(0, begin));
          if (!is_white_space(c)) break;
          begin -= bytes;
        }
      }
      if (token->rstrip) {
        while (end < text.size()) {
          const auto [c, bytes] = first_character(text.substr(end));
          if (!is_white_space(c)) break;
          end += bytes;
        }
      }
      if (covered < begin) on_text(text.substr(covered, begin - covered));
      on_token(token->id);
      covered = end;
    }
    if (covered < text.size()) on_text(text.substr(covered));
  }

 private:
  static constexpr std::size_t none = std::numeric_limits<std::size_t>::max();

  static std::uint64_t key(std::uint32_t node, char c) {
    return std::uint64_t{node} << 8 | static_cast<unsigned char>(c);
  }

  std::pair<const AddedToken*, std::size_t> longest(std::string_view text,
                                                    std::size_t position) const {
    std::pair<const AddedToken*, std::size_t> best{nullptr, 0};
    if (!m_first[static_cast<unsigned char>(text[position])]) return best;
    std::uint32_t node = 0;
    for (std::size_t i = position; i < text.size(); ++i) {
      const auto edge = m_edges.find(key(node, text[i]));
      if (edge == m_edges.end()) break;
      node = edge->second;
      if (m_token_at[node] != none) best = {&m_tokens[m_token_at[node]], i + 1 - position};
    }
    return best;
  }

  std::unordered_map<std::uint64_t, std::uint32_t> m_edges;
  std::vector<std::size_t> m_token_at{none};
  std::vector<AddedToken> m_tokens;
  std::array<bool, 256> m_first{};
};

// ---- Byte-pair encoding -------------------------------------------------------------------------

struct Merge {
  std::uint32_t rank;
  TokenId id;
};

using MergeTable = std::unordered_map<std::uint64_t, Merge>;

std::uint64_t pair_key(TokenId left, TokenId right) {
  return std::uint64_t{static_cast<std::uint32_t>(left)} << 32 | static_cast<std::uint32_t>(right);
}

// Applies merges to the symbols, lowest rank first and leftmost among equals, in n log n steps: the
// symbols are a linked list, the candidate merges a heap in which outdated ones are skipped.
void apply_merges(std::vector<TokenId>& symbols, const MergeTable& merges) {
  struct Node {
    TokenId id;
    std::ptrdiff_t previous, next;  // -1: none
    bool removed;
  };
  struct Candidate {
    std::uint32_t rank;
    std::ptrdiff_t position;
    TokenId id;
    bool operator>(const Candidate& other) const {
      return std::tie(rank, position) > std::tie(other.rank, other.position);
    }
  };
  const auto count = static_cast<std::ptrdiff_t>(symbols.size());
  std::vector<Node> nodes(symbols.size());
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    nodes[i] = {symbols[i], i - 1, i + 1 < count ? i + 1 : -1, false};
  }
  std::vector<Candidate> candidates;
  candidates.reserve(symbols.size());
  for (std::ptrdiff_t i = 0; i + 1 < count; ++i) {
    const auto merge = merges.find(pair_key(symbols[i], symbols[i + 1]));
    if (merge != merges.end()) candidates.push_back({merge->second.rank, i, merge->second.id});
  }
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue(
      std::greater<>{}, std::move(candidates));
  const auto push = [&](std::ptrdiff_t left) {
    const auto merge = merges.find(pair_key(nodes[left].id, nodes[nodes[left].next].id));
    if (merge != merges.end()) queue.push({merge->second.rank, left, merge->second.id});
  };
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    Node& left = nodes[top.position];
    if (left.removed || left.next < 0) continue;
    Node& right = nodes[left.next];
    const auto merge = merges.find(pair_key(left.id, right.id));
    if (merge == merges.end() || merge->second.id != top.id) continue;
    left.id = top.id;
    right.removed = true;
    left.next = right.next;
    if (left.next >= 0) nodes[left.next].previous = top.position;
    if (left.previous >= 0) push(left.previous);
    if (left.next >= 0) push(top.position);
  }
  symbols.clear();
  for (const Node& node : nodes) {
    if (!node.removed) symbols.push_back(node.id);
  }
}

}  // namespace

// ---- Tokenizer ----------------------------------------------------------------------------------

struct Tokenizer::Data {
  // Tokens in the byte alphabet, added ones as they are written.
  std::unordered_map<std::string, TokenId> vocabulary;
  // What each token decodes to.
  std::unordered_map<TokenId, std::string> bytes;
  std::unordered_set<TokenId> special;
  std::size_t size = 0;

  std::unordered_map<std::string, TokenId> added;
  AddedTokenMatcher raw_matcher;         // added tokens sought in the text as it is
  AddedTokenMatcher normalized_matcher;  // those sought in the normalized text

  bool nfc = false;
  std::vector<Splitter> splitters;
  bool add_prefix_space = false;
  std::optional<Splitter> byte_level_splitter;

  std::array<TokenId, 256> byte_ids{};
  MergeTable merges;
  bool ignore_merges = false;

  std::vector<TokenId> prefix, suffix;

  explicit Data(const Field& root) {
    read_model(root.member("model"));
    read_normalizer(root.member("normalizer"), 0);
    read_added_tokens(root.member("added_tokens"));
    read_pre_tokenizers(root.member("pre_tokenizer"));
    read_post_processor(root.member("post_processor"), 0);
    read_decoder(root.member("decoder"));
  }

  void read_model(const Field& model);
  void read_vocabulary(const Field& field);
  void read_merges(const Field& field);
  void read_normalizer(const Field& field, int depth);
  void read_added_tokens(const Field& field);
  void read_pre_tokenizers(const Field& field);
  bool read_pre_tokenizer(const Field& field, bool is_last, int depth);
  void read_post_processor(const Field& field, int depth);
  void read_template(const Field& field);
  void read_decoder(const Field& field);

  using Cache = std::unordered_map<std::string, std::vector<TokenId>>;
  void encode_text(std::string_view text, Cache& cache, std::vector<TokenId>& ids) const;
  void encode_pre_token(std::string_view text, Cache& cache, std::vector<TokenId>& ids) const;

  // Bytes that a token adds to the decoded text.
  std::string_view decoded(TokenId id, bool skip_special_tokens) const {
    const auto found = bytes.find(id);
    if (found == bytes.end() || (skip_special_tokens && special.count(id) != 0)) return {};
    return found->second;
  }
};

void Tokenizer::Data::read_model(const Field& model) {
  const Field type = model.member("type");
  // Files of old releases leave the type of a BPE model out.
  if (!type.is_null() && type.string() != "BPE") type.fail("\"BPE\"");
  if (model.member("byte_fallback").boolean(false)) {
    model.member("byte_fallback").fail("false (a byte-level, not a SentencePiece, vocabulary)");
  }
  const Field dropout = model.member("dropout");
  if (!dropout.is_null() && !(dropout.value().is_number() && dropout.value().get<double>() == 0)) {
    dropout.fail("null or 0");
  }
  model.member("continuing_subword_prefix").require_null_or_empty_string();
  model.member("end_of_word_suffix").require_null_or_empty_string();
  ignore_merges = model.member("ignore_merges").boolean(false);
  read_vocabulary(model.member("vocab"));
  read_merges(model.member("merges"));
}

void Tokenizer::Data::read_vocabulary(const Field& field) {
  if (!field.value().is_object()) field.fail("an object");
  vocabulary.reserve(field.value().size());
  for (const auto& [token, value] : field.value().items()) {
    const TokenId id = field.member(token).token_id();
    if (!bytes.emplace(id, byte_alphabet().decode(token)).second) {
      field.member(token).fail("an id that no other token has");
    }
    vocabulary.emplace(token, id);
  }
  size = vocabulary.size();
  for (int byte = 0; byte < 256; ++byte) {
    const auto found = vocabulary.find(byte_alphabet().of_byte[byte]);
    if (found == vocabulary.end()) {
      fail(field.where(),
           fmt::format("a token for each byte (\"{}\" for {:#04x})", byte_alphabet().of_byte[byte],
                       byte),
           "none");
    }
    byte_ids[byte] = found->second;
  }
}

void Tokenizer::Data::read_merges(const Field& field) {
  const std::size_t count = field.array_size();
  if (count == 0) field.fail("merges");
  merges.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    const Field entry = field.element(i);
    std::string left, right;
    if (entry.value().is_string()) {
      const std::string& text = entry.string();
      const std::size_t space = text.find(' ');
      if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
        entry.fail("two tokens with a space between them");
      }
      left = text.substr(0, space);
      right = text.substr(space + 1);
    } else {
      if (entry.array_size() != 2) entry.fail("two tokens");
      left = entry.element(0).string();
      right = entry.element(1).string();
    }
    const auto id_of = [&](const std::string& token) {
      const auto found = vocabulary.find(token);
      if (found == vocabulary.end()) {
        fail(entry.where(), "tokens of model.vocab", abbreviated(token));
      }
      return found->second;
    };
    // A pair given twice counts with its later rank.
    merges[pair_key(id_of(left), id_of(right))] = {static_cast<std::uint32_t>(i),
                                                   id_of(left + right)};
  }
}

void Tokenizer::Data::read_normalizer(const Field& field, int depth) {
  if (field.is_null()) return;
  const Field type = field.member("type");
  if (type.string() == "NFC") {
    nfc = true;
  } else if (type.string() == "Sequence" && depth < max_nesting) {
    const Field normalizers = field.member("normalizers");
    for (std::size_t i = 0; i < normalizers.array_size(); ++i) {
      read_normalizer(normalizers.element(i), depth + 1);
    }
  } else {
    type.fail("NFC or a Sequence of NFC");
  }
}

void Tokenizer::Data::read_added_tokens(const Field& field) {
  if (field.is_null()) return;
  for (std::size_t i = 0; i < field.array_size(); ++i) {
    const Field entry = field.element(i);
    const std::string& content = entry.member("content").string();
    const Field id_field = entry.member("id");
    const AddedToken token{id_field.token_id(), entry.member("single_word").boolean(false),
                           entry.member("lstrip").boolean(false),
                           entry.member("rstrip").boolean(false)};
    const bool is_special = entry.member("special").boolean(false);
    const bool normalized = entry.member("normalized").boolean(!is_special);
    if (content.empty()) entry.member("content").fail("a text that is not empty");

    const auto in_model = vocabulary.find(content);
    if (in_model != vocabulary.end()) {
      if (in_model->second != token.id) {
        id_field.fail(fmt::format("{}, the id in model.vocab", in_model->second));
      }
    } else if (bytes.count(token.id) != 0) {
      id_field.fail("an id that no other token has");
    } else {
      ++size;
    }
    if (!added.emplace(content, token.id).second) {
      entry.member("content").fail("a token that is not listed before");
    }
    const std::string pattern = normalized && nfc ? normalize_nfc(content) : content;
    if (!(normalized ? normalized_matcher : raw_matcher).insert(pattern, token)) {
      entry.member("content").fail("a token that normalizes like no other");
    }
    bytes[token.id] = byte_alphabet().decode(pattern);
    if (is_special) special.insert(token.id);
  }
}

void Tokenizer::Data::read_pre_tokenizers(const Field& field) {
  if (field.is_null() || !read_pre_tokenizer(field, true, 0)) {
    field.fail("a ByteLevel pre-tokenizer, or a Sequence that ends with one");
  }
}

// Returns whether it was, or ended with, ByteLevel; nothing may follow that.
bool Tokenizer::Data::read_pre_tokenizer(const Field& field, bool is_last, int depth) {
  const Field type = field.member("type");
  const std::string& name = type.string();
  if (name == "Sequence" && depth < max_nesting) {
    const Field members = field.member("pretokenizers");
    const std::size_t count = members.array_size();
    bool byte_level = false;
    for (std::size_t i = 0; i < count; ++i) {
      byte_level = read_pre_tokenizer(members.element(i), is_last && i + 1 == count, depth + 1);
    }
    return byte_level;
  }
  if (name == "Split") {
    const Field pattern = field.member("pattern");
    const Field regex = pattern.member("Regex");
    const Field literal = pattern.member("String");
    if (regex.is_null() == literal.is_null()) pattern.fail("a Regex or a String");
    splitters.emplace_back(
        regex.is_null() ? Pattern(literal.string(), PCRE2_LITERAL, literal.where())
                        : translated_pattern(regex),
        split_behavior(field.member("behavior")), field.member("invert").boolean(false));
    return false;
  }
  if (name == "Digits") {
    splitters.emplace_back(Pattern("\\p{N}", 0, field.where()),
                           field.member("individual_digits").boolean(false)
                               ? SplitBehavior::isolated
                               : SplitBehavior::contiguous,
                           false);
    return false;
  }
  if (name == "ByteLevel") {
    if (!is_last) type.fail("ByteLevel only as the last pre-tokenizer");
    add_prefix_space = field.member("add_prefix_space").boolean();
    if (field.member("use_regex").boolean(true)) {
      const Json pattern =
          R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
      byte_level_splitter.emplace(translated_pattern({pattern, field.where(), "use_regex"}),
                                  SplitBehavior::isolated, false);
    }
    return true;
  }
  type.fail("Split, Digits, ByteLevel or a Sequence of these");
}

void Tokenizer::Data::read_post_processor(const Field& field, int depth) {
  if (field.is_null()) return;
  const Field type = field.member("type");
  const std::string& name = type.string();
  if (name == "Sequence" && depth < max_nesting) {
    const Field processors = field.member("processors");
    for (std::size_t i = 0; i < processors.array_size(); ++i) {
      read_post_processor(processors.element(i), depth + 1);
    }
  } else if (name == "TemplateProcessing") {
    read_template(field);
  } else if (name != "ByteLevel") {  // which only changes offsets
    type.fail("ByteLevel, TemplateProcessing or a Sequence of these");
  }
}

void Tokenizer::Data::read_template(const Field& field) {
  const Field single = field.member("single");
  const Field special_tokens = field.member("special_tokens");
  std::vector<TokenId> before, after;
  bool text_seen = false;
  for (std::size_t i = 0; i < single.array_size(); ++i) {
    const Field piece = single.element(i);
    const Field sequence = piece.member("Sequence");
    if (!sequence.is_null()) {
      if (sequence.member("id").string() != "A" || text_seen) {
        single.fail("the sequence A once");
      }
      text_seen = true;
      continue;
    }
    const std::string& name = piece.member("SpecialToken").member("id").string();
    const Field token_ids = special_tokens.member(name).member("ids");
    for (std::size_t k = 0; k < token_ids.array_size(); ++k) {
      const TokenId id = token_ids.element(k).token_id();
      if (bytes.count(id) == 0) token_ids.element(k).fail("the id of a token");
      (text_seen ? after : before).push_back(id);
    }
  }
  if (!text_seen) single.fail("the sequence A once");
  // In a Sequence of post-processors a later template goes around the earlier ones.
  prefix.insert(prefix.begin(), before.begin(), before.end());
  suffix.insert(suffix.end(), after.begin(), after.end());
}

void Tokenizer::Data::read_decoder(const Field& field) {
  if (field.is_null()) field.fail("a ByteLevel decoder");
  const Field type = field.member("type");
  if (type.string() == "Sequence") {
    const Field decoders = field.member("decoders");
    if (decoders.array_size() != 1) decoders.fail("one ByteLevel decoder");
    const Field only = decoders.element(0).member("type");
    if (only.string() != "ByteLevel") only.fail("ByteLevel");
  } else if (type.string() != "ByteLevel") {
    type.fail("ByteLevel");
  }
}

void Tokenizer::Data::encode_pre_token(std::string_view text, Cache& cache,
                                       std::vector<TokenId>& ids) const {
  const bool cacheable = text.size() <= max_cached_bytes;
  std::string key;
  if (cacheable) {
    key = text;
    const auto found = cache.find(key);
    if (found != cache.end()) {
      ids.insert(ids.end(), found->second.begin(), found->second.end());
      return;
    }
  }
  std::vector<TokenId> symbols;
  if (ignore_merges) {
    std::string token;
    for (const char byte : text) token += byte_alphabet().of_byte[static_cast<unsigned char>(byte)];
    const auto found = vocabulary.find(token);
    if (found != vocabulary.end()) symbols = {found->second};
  }
  if (symbols.empty()) {
    symbols.reserve(text.size());
    for (const char byte : text) symbols.push_back(byte_ids[static_cast<unsigned char>(byte)]);
    apply_merges(symbols, merges);
  }
  ids.insert(ids.end(), symbols.begin(), symbols.end());
  if (cacheable && cache.size() < max_cached_pre_tokens) {
    cache.emplace(std::move(key), std::move(symbols));
  }
}

void Tokenizer::Data::encode_text(std::string_view text, Cache& cache,
                                  std::vector<TokenId>& ids) const {
  std::vector<std::string_view> pieces{text}, parts;
  const auto split_all = [&](const Splitter& splitter) {
    parts.clear();
    for (const std::string_view piece : pieces) splitter.split(piece, parts);
    pieces.swap(parts);
  };
  for (const Splitter& splitter : splitters) split_all(splitter);
  std::deque<std::string> prefixed;  // what the pieces view; a deque never moves its elements
  if (add_prefix_space) {
    for (std::string_view& piece : pieces) {
      if (piece.front() != ' ') piece = prefixed.emplace_back(" " + std::string(piece));
    }
  }
  if (byte_level_splitter) split_all(*byte_level_splitter);
  for (const std::string_view piece : pieces) encode_pre_token(piece, cache, ids);
}

Tokenizer::Tokenizer(std::shared_ptr<const Data> data) : m_data(std::move(data)) {}

Tokenizer Tokenizer::load(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "tokenizer.json";
  std::ifstream stream(path, std::ios::binary);
  // Opening a directory succeeds; only reading it fails.
  if (!stream || std::filesystem::is_directory(path)) {
    throw Error(fmt::format("{}: expected a tokenizer, found no readable file", path.string()));
  }
  Json root;
  try {
    root = Json::parse(stream);
  } catch (const Json::exception& error) {
    fail(path.string(), "JSON", error.what());
  }
  return Tokenizer(std::make_shared<const Data>(Field(root, path.string(), "")));
}

std::vector<TokenId> Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
  std::string repaired;
  if (!is_valid_utf8(text)) {
    append_lossy(repaired, text, true);
    text = repaired;
  }
  const Data& data = *m_data;
  std::vector<TokenId> ids;
  Data::Cache cache;
  if (add_special_tokens) ids = data.prefix;
  const auto on_token = [&](TokenId id) { ids.push_back(id); };
  const auto on_normalized = [&](std::string_view piece) { data.encode_text(piece, cache, ids); };
  data.raw_matcher.scan(text, on_token, [&](std::string_view piece) {
    if (data.nfc) {
      data.normalized_matcher.scan(normalize_nfc(piece), on_token, on_normalized);
    } else {
      data.normalized_matcher.scan(piece, on_token, on_normalized);
    }
  });
  if (add_special_tokens) ids.insert(ids.end(), data.suffix.begin(), data.suffix.end());
  return ids;
}

std::string Tokenizer::decode(const std::vector<TokenId>& ids, bool skip_special_tokens) const {
  std::string bytes, text;
  for (const TokenId id : ids) bytes += m_data->decoded(id, skip_special_tokens);
  append_lossy(text, bytes, true);
  return text;
}

std::optional<TokenId> Tokenizer::token_id(std::string_view content) const {
  const std::string key(content);
  for (const auto* table : {&m_data->added, &m_data->vocabulary}) {
    const auto found = table->find(key);
    if (found != table->end()) return found->second;
  }
  return std::nullopt;
}

bool Tokenizer::is_special(TokenId id) const { return m_data->special.count(id) != 0; }

std::size_t Tokenizer::vocabulary_size() const { return m_data->size; }

Tokenizer::StreamDecoder::StreamDecoder(const Tokenizer& tokenizer, bool skip_special_tokens)
    : m_data(tokenizer.m_data), m_skip_special_tokens(skip_special_tokens) {}

std::string Tokenizer::StreamDecoder::append(TokenId id) {
  m_pending += m_data->decoded(id, m_skip_special_tokens);
  std::string text;
  m_pending.erase(0, append_lossy(text, m_pending, false));
  return text;
}

std::string Tokenizer::StreamDecoder::finish() {
  std::string text;
  append_lossy(text, m_pending, true);
  m_pending.clear();
  return text;
}

}  // namespace kvzap
