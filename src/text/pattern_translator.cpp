#include "text/pattern_translator.hpp"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include <algorithm>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "files/ascii.hpp"

namespace kvzap::text {
namespace {

// White_Space and its complement as the inside of a PCRE2 class: under UCP, PCRE2's own \s also
// matches U+180E. Both end with a range, so a following hyphen is literal, as it is after \s.
constexpr std::string_view space_set =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{2000}-\x{200a})";
constexpr std::string_view not_space_set =
    R"(\x{0}-\x{8}\x{e}-\x{1f}\x{21}-\x{84}\x{86}-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff})"
    R"(\x{200b}-\x{2027}\x{202a}-\x{202e}\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{10ffff})";

// Oniguruma's \w: Alphabetic, marks, decimal numbers and connectors; outside of classes, it adds
// the numbers of Latin-1. PCRE2's differs.
constexpr std::string_view latin_numbers = R"(\xb2\xb3\xb9\xbc-\xbe)";
constexpr std::string_view word_set =
    R"(\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc}\x{24b6}-\x{24e9}\x{1f130}-\x{1f149}\x{1f150}-\x{1f169})"
    R"(\x{1f170}-\x{1f189})";

// PCRE2 compiles no pattern that is much longer, and the translation of a character can take a
// hundred bytes.
constexpr std::size_t max_pattern_bytes = 16u << 10;

class PatternTranslator {
 public:
  explicit PatternTranslator(const files::JsonField& field)
      : m_field(field), m_pattern(field.string()) {}

  std::string translate() {
    if (m_pattern.size() > max_pattern_bytes) {
      m_field.fail(fmt::format("a regular expression of at most {} bytes", max_pattern_bytes));
    }
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
    files::throw_unexpected(m_field.where(), "a regular expression in the supported syntax",
                            fmt::format("{} in {}", construct, files::abbreviated(m_pattern)));
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
      case 'w':
        return replace(
            2, in_class ? std::string(word_set) : fmt::format("[{}{}]", latin_numbers, word_set));
      case 'W':
        if (in_class) refuse("\\W in a class");
        return replace(2, fmt::format("[^{}{}]", latin_numbers, word_set));
      case 'b':
      case 'B':
        if (in_class) refuse(fmt::format("\\{} in a class", c));
        return replace(2, word_boundary(c == 'b'));
      case 'h':  // a hexadecimal digit; in PCRE2, \h is horizontal white space
        return replace(2, in_class ? "a-fA-F0-9" : "[a-fA-F0-9]");
      case 'd':
        return replace(2, "\\p{Nd}");
      case 'D':
        return replace(2, "\\P{Nd}");
      case 'v':  // the vertical tab; in PCRE2, \v is a class
        return replace(2, "\\x{b}");
      case 'A':
      case 'z':
      case 'Z':
        if (in_class) refuse(fmt::format("\\{} in a class", c));
        return copy(2);
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
        if (files::is_letter_or_digit(c)) refuse(fmt::format("\\{}", c));
        // The escaped character may have several bytes; the others follow as ordinary ones.
        return copy(2);
    }
  }

  static std::string word_boundary(bool present) {
    const std::string word = fmt::format("[{}{}]", latin_numbers, word_set);
    return fmt::format("(?:(?<={0})(?{1}{0})|(?<!{0})(?{2}{0}))", word, present ? "!" : "=",
                       present ? "=" : "!");
  }

  // p{L}, \p{Lu}, \p{^L}, \p{Han}. A script stands for its Script property. PCRE2 10.40 and newer
  // needs the prefix sc: for that; older versions know no other property of scripts.
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
    // Without braces, Oniguruma reads \x80 and above as bytes, not characters.
    if (at("\\x") && !braces && rest()[begin] >= '8') refuse("\\x with a byte above 7f");
    const std::string digits(rest().substr(begin, end - begin));
    replace(end + (braces ? 1 : 0), fmt::format("\\x{{{}}}", digits));
  }

  // A class is an intersection of unions. In PCRE2, which has no intersection, a look-ahead tests
  // each union but the last.
  void character_class() {
    ++m_position;
    const bool negated = at("^");
    if (negated) ++m_position;
    std::string outer = std::exchange(m_result, {});
    std::vector<std::string> unions;
    bool single_complement = false;
    do {
      if (!unions.empty()) m_position += 2;  // the && before
      const bool complement = at("[^");
      if (complement) m_position += 2;
      class_union(complement);
      if (complement) {
        if (!at("]")) refuse("an intersection within a nested class");
        ++m_position;
        if (!at("]") && !at("&&")) refuse("a negated class beside other members");
      }
      const std::string members = std::exchange(m_result, {});
      const bool literal_caret = !complement && members[0] == '^';
      unions.push_back(
          fmt::format("[{}{}]", complement ? "^" : (literal_caret ? "\\" : ""), members));
      single_complement = complement;
    } while (at("&&"));
    ++m_position;
    m_result = std::move(outer);
    if (unions.size() == 1) {
      if (negated && single_complement) refuse("a negated class within a negated class");
      m_result += negated ? "[^" + unions[0].substr(1) : unions[0];
      return;
    }
    std::string all = unions.back();
    for (std::size_t i = unions.size() - 1; i-- > 0;) all = "(?=" + unions[i] + ")" + all;
    m_result += negated ? "(?:(?!" + all + ")[\\x{0}-\\x{10ffff}])" : "(?:" + all + ")";
  }

  // Translates members of a class up to its end or &&. Classes within it join it.
  void class_union(bool nested) {
    const std::size_t begin = m_position;
    if (at("]")) refuse("a class that starts with ]");
    while (!at("]") && !at("&&")) {
      if (rest().empty()) refuse("an unclosed class");
      if (at("\\")) {
        escape(true);
      } else if (!at("[")) {
        copy(1);
      } else if (at("[:") || at("[^")) {
        refuse("a bracket expression or a negated class within a class");
      } else if (nested) {
        refuse("a class within a class within a class");
      } else {
        // A hyphen beside a bracket would be part of a range in the joined class.
        if (at("[-") || (m_position > begin && m_pattern[m_position - 1] == '-')) {
          refuse("a hyphen beside a nested class");
        }
        ++m_position;
        class_union(true);
        if (!at("]")) refuse("an intersection within a nested class");
        if (m_pattern[m_position - 1] == '-' || at("]-")) refuse("a hyphen beside a nested class");
        ++m_position;
      }
    }
    if (m_position == begin) refuse("an empty class");
  }

  void group() {
    if (!at("(?")) {
      if (at("(*")) refuse("a verb");
      return copy(1);
    }
    for (const std::string_view opening : {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:"}) {
      if (at(opening)) return copy(opening.size());
    }
    // At other places, the scope of (?i) differs across the alternatives.
    if (m_position == 0 && at("(?i)")) return copy(4);
    refuse(fmt::format("the group {}", rest().substr(0, 4)));
  }

  // {n}, {n,}, {n,m} and Oniguruma's {,m}. A + after an interval makes it possessive in PCRE2 but
  // repeats it in Oniguruma. A ? after {n} makes it optional in Oniguruma.
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

  const files::JsonField& m_field;
  const std::string& m_pattern;
  std::size_t m_position = 0;
  std::string m_result;
};

}  // namespace

std::string translate_pattern(const files::JsonField& field) {
  return PatternTranslator(field).translate();
}

}  // namespace kvzap::text
