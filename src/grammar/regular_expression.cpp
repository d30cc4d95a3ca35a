#include "grammar/regular_expression.hpp"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "grammar/text_cursor.hpp"
#include "text/utf8.hpp"

namespace kvzap::grammar {
namespace {

using Ranges = std::vector<CodePoints>;

const Ranges decimal_digits = {{'0', '9'}};
const Ranges word_characters = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
const Ranges white_space = {{'\t', '\r'},     {' ', ' '},       {0xA0, 0xA0},     {0x1680, 0x1680},
                            {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F},
                            {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
const Ranges line_ends = {{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};

/// Long names of general categories, with the short ones.
constexpr std::pair<std::string_view, std::string_view> category_names[] = {
    {"Letter", "L"},
    {"Cased_Letter", "LC"},
    {"Uppercase_Letter", "Lu"},
    {"Lowercase_Letter", "Ll"},
    {"Titlecase_Letter", "Lt"},
    {"Modifier_Letter", "Lm"},
    {"Other_Letter", "Lo"},
    {"Mark", "M"},
    {"Nonspacing_Mark", "Mn"},
    {"Spacing_Mark", "Mc"},
    {"Enclosing_Mark", "Me"},
    {"Number", "N"},
    {"Decimal_Number", "Nd"},
    {"Letter_Number", "Nl"},
    {"Other_Number", "No"},
    {"Punctuation", "P"},
    {"Connector_Punctuation", "Pc"},
    {"Dash_Punctuation", "Pd"},
    {"Open_Punctuation", "Ps"},
    {"Close_Punctuation", "Pe"},
    {"Initial_Punctuation", "Pi"},
    {"Final_Punctuation", "Pf"},
    {"Other_Punctuation", "Po"},
    {"Symbol", "S"},
    {"Math_Symbol", "Sm"},
    {"Currency_Symbol", "Sc"},
    {"Modifier_Symbol", "Sk"},
    {"Other_Symbol", "So"},
    {"Separator", "Z"},
    {"Space_Separator", "Zs"},
    {"Line_Separator", "Zl"},
    {"Paragraph_Separator", "Zp"},
    {"Other", "C"},
    {"Control", "Cc"},
    {"Format", "Cf"},
    {"Private_Use", "Co"},
    {"Unassigned", "Cn"},
};

bool is_in_category(utf8proc_int32_t c, std::string_view category) {
  const std::string_view own = utf8proc_category_string(c);
  if (category == "LC") return own == "Lu" || own == "Ll" || own == "Lt";
  return own.substr(0, category.size()) == category;
}

/// Empty if there is no such category.
Ranges characters_of_category(std::string_view category) {
  Ranges ranges;
  for (char32_t c = 0; c <= last_code_point; ++c) {
    if (!is_in_category(static_cast<utf8proc_int32_t>(c), category)) continue;
    if (!ranges.empty() && ranges.back().second + 1 == c) {
      ranges.back().second = c;
    } else {
      ranges.emplace_back(c, c);
    }
  }
  return ranges;
}

/// The texts of a part of a pattern, apart by the ends of the whole text to which ^ and $ in it
/// bind them.
struct Part {
  enum Bound : unsigned { start = 1, end = 2 };
  struct Form {
    std::vector<Expr> choices;
    bool has_empty = false;
  };
  std::array<Form, 4> forms;

  void add(unsigned bounds, Expr texts, bool has_empty) {
    forms[bounds].choices.push_back(std::move(texts));
    forms[bounds].has_empty |= has_empty;
  }
  void add(Part other) {
    for (unsigned bounds = 0; bounds < forms.size(); ++bounds) {
      for (Expr& texts : other.forms[bounds].choices) {
        add(bounds, std::move(texts), other.forms[bounds].has_empty);
      }
    }
  }
  bool is_bound() const {
    return std::any_of(forms.begin() + 1, forms.end(),
                       [](const Form& form) { return !form.choices.empty(); });
  }
  /// Unbound texts.
  Expr texts() const { return either(forms[0]); }
  static Expr either(const Form& form) {
    return form.choices.empty() ? nothing() : choice(form.choices);
  }
};

Part unbound(Expr texts, bool has_empty = false) {
  Part part;
  part.add(0, std::move(texts), has_empty);
  return part;
}

/// What precedes ^ and what follows $ is empty.
Part concatenated(const Part& a, const Part& b) {
  Part result;
  for (unsigned left = 0; left < a.forms.size(); ++left) {
    for (unsigned right = 0; right < b.forms.size(); ++right) {
      const Part::Form &first = a.forms[left], &second = b.forms[right];
      if (first.choices.empty() || second.choices.empty()) continue;
      const bool no_first = (right & Part::start) != 0, no_second = (left & Part::end) != 0;
      if ((no_first && !first.has_empty) || (no_second && !second.has_empty)) continue;
      std::vector<Expr> parts;
      if (!no_first) parts.push_back(Part::either(first));
      if (!no_second) parts.push_back(Part::either(second));
      result.add(left | right, sequence(std::move(parts)), first.has_empty && second.has_empty);
    }
  }
  return result;
}

class PatternReader final : TextCursor {
 public:
  PatternReader(std::string_view pattern, const CharacterWriter& write)
      : TextCursor(pattern), m_write(write) {}

  Part read() {
    if (m_text.size() > max_pattern_bytes) {
      fail(fmt::format("expected at most {} bytes, found {}", max_pattern_bytes, m_text.size()));
    }
    if (!text::is_valid_utf8(m_text)) fail("expected UTF-8");
    Part all = alternatives(0);
    if (!at_end()) fail("')' without '('");
    return all;
  }

 private:
  [[noreturn]] void fail(const std::string& message) const { fail(message, m_at); }
  [[noreturn]] static void fail(const std::string& message, std::size_t at) {
    throw Error(fmt::format("regular expression, byte {}: {}", at, message));
  }

  [[noreturn]] void fail_at(std::size_t place, const std::string& message) const override {
    fail(message, place);
  }

  char32_t character() {
    if (at_end()) fail("the pattern ends too early");
    const auto [code, bytes] = text::first_character(m_text.substr(m_at));
    m_at += bytes;
    return static_cast<char32_t>(code);
  }

  Part alternatives(int depth) {
    if (depth > max_pattern_depth) fail(fmt::format("over {} groups in groups", max_pattern_depth));
    Part result = terms(depth);
    while (take("|")) result.add(terms(depth));
    return result;
  }

  Part terms(int depth) {
    // Runs of terms without anchors are joined at once.
    Part result = unbound(empty(), true);
    std::vector<Expr> run;
    bool run_has_empty = true;
    const auto join = [&] {
      if (run.empty()) return;
      result = concatenated(result, unbound(sequence(std::move(run)), run_has_empty));
      run.clear();
      run_has_empty = true;
    };
    while (!at_end() && !follows("|") && !follows(")")) {
      Part part = quantified(depth);
      if (part.is_bound()) {
        join();
        result = concatenated(result, part);
      } else {
        run_has_empty &= part.forms[0].has_empty;
        run.push_back(part.texts());
      }
    }
    join();
    return result;
  }

  Part quantified(int depth) {
    const std::size_t start = m_at;
    Part part = atom(depth);
    const auto counts = quantifier();
    if (!counts) return part;
    const auto [least, most] = *counts;
    take("?");  // lazy: the same texts
    if (follows("*") || follows("+") || follows("?") || quantifier_follows()) {
      fail("a quantifier after a quantifier is not supported");
    }
    if (part.is_bound()) {
      if (most > 1) fail("an anchor in a repeated group is not supported", start);
      if (most == 0) return unbound(empty(), true);
      if (least == 0) part.add(0, empty(), true);
      return part;
    }
    return unbound(repeat(part.texts(), least, most), least == 0 || part.forms[0].has_empty);
  }

  bool quantifier_follows() const {
    return follows("{") && m_at + 1 < m_text.size() && m_text[m_at + 1] >= '0' &&
           m_text[m_at + 1] <= '9';
  }

  std::optional<std::pair<std::int64_t, std::int64_t>> quantifier() {
    if (take("*")) return {{0, unlimited}};
    if (take("+")) return {{1, unlimited}};
    if (take("?")) return {{0, 1}};
    // Engines disagree on {,n}: a literal, or {0,n}.
    if (follows("{,")) fail("'{,' is not supported: write {0,n}, or \\{ for the character");
    if (!quantifier_follows()) return std::nullopt;
    const std::size_t start = m_at++;
    const std::int64_t least = count();
    std::int64_t most = least;
    if (take(",")) most = follows("}") ? unlimited : count();
    if (!take("}")) fail("expected '}' after a count");
    if (most < least) fail("the counts are in the wrong order", start);
    return {{least, most}};
  }

  Part atom(int depth) {
    const std::size_t start = m_at;
    if (take("(")) return group(depth, start);
    if (take("[")) return unbound(m_write(character_class(start)));
    if (take(".")) return unbound(m_write(complement(line_ends)));
    if (take("^")) return anchor(Part::start);
    if (take("$")) return anchor(Part::end);
    if (take("\\")) return unbound(m_write(escape(start, false)));
    if (follows("*") || follows("+") || follows("?") || quantifier_follows()) {
      fail("nothing to repeat");
    }
    const char32_t code = character();
    return unbound(m_write({{code, code}}));
  }

  static Part anchor(unsigned bound) {
    Part part;
    part.add(bound, empty(), true);
    return part;
  }

  Part group(int depth, std::size_t start) {
    if (take("?")) {
      if (take("=") || take("!")) fail("lookahead is not supported", start);
      if (follows("<=") || follows("<!")) fail("lookbehind is not supported", start);
      if (take("P=") || take("P>")) fail("back references are not supported", start);
      if (take("P<") || take("<")) {
        const std::size_t end = m_text.find('>', m_at);
        if (end == std::string_view::npos) fail("a group's name without '>'", start);
        m_at = end + 1;
      } else if (!take(":")) {
        fail("expected '(?:' or '(?<name>': flags and other kinds of groups are not supported",
             start);
      }
    }
    Part part = alternatives(depth + 1);
    if (!take(")")) fail("'(' without ')'", start);
    return part;
  }

  Ranges character_class(std::size_t start) {
    const bool negated = take("^");
    Ranges ranges;
    while (!take("]")) {
      if (at_end()) fail("'[' without ']'", start);
      const Ranges first = class_atom();
      const bool is_range =
          follows("-") && m_at + 1 < m_text.size() && m_text[m_at + 1] != ']' && is_one(first);
      if (!is_range) {
        ranges.insert(ranges.end(), first.begin(), first.end());
        continue;
      }
      const std::size_t dash = m_at++;
      const Ranges last = class_atom();
      if (!is_one(last)) fail("a range to a class of characters", dash);
      if (last[0].first < first[0].first) fail("a range in the wrong order", dash);
      ranges.emplace_back(first[0].first, last[0].first);
    }
    return negated ? complement(std::move(ranges)) : ranges;
  }

  static bool is_one(const Ranges& ranges) {
    return ranges.size() == 1 && ranges[0].first == ranges[0].second;
  }

  Ranges class_atom() {
    const std::size_t start = m_at;
    if (take("\\")) return escape(start, true);
    const char32_t code = character();
    return {{code, code}};
  }

  Ranges escape(std::size_t start, bool in_class) {
    const char32_t letter = character();
    switch (letter) {
      case 'd':
        return decimal_digits;
      case 'D':
        return complement(decimal_digits);
      case 'w':
        return word_characters;
      case 'W':
        return complement(word_characters);
      case 's':
        return white_space;
      case 'S':
        return complement(white_space);
      case 'p':
      case 'P':
        return property(start, letter == 'P');
      case 'b':
        if (!in_class) fail("\\b is not supported", start);
        return {{'\b', '\b'}};
      case 'B':
        fail("\\B is not supported", start);
      case 'k':
        fail("back references are not supported", start);
      default:
        break;
    }
    const char32_t code = escaped_character(letter, start);
    return {{code, code}};
  }

  char32_t escaped_character(char32_t letter, std::size_t start) {
    switch (letter) {
      case 't':
        return '\t';
      case 'n':
        return '\n';
      case 'r':
        return '\r';
      case 'f':
        return '\f';
      case 'v':
        return '\v';
      case 'x':
        return hexadecimal(2, start);
      case 'u':
        return unicode(start);
      case 'c': {
        const char32_t control = character();
        if ((control | 0x20) < 'a' || (control | 0x20) > 'z') fail("expected \\cA to \\cZ", start);
        return control & 0x1F;
      }
      case '0':
        if (digit_follows()) {
          fail("octal escapes are not supported", start);
        }
        return 0;
      default:
        break;
    }
    if (letter >= '1' && letter <= '9') fail("back references are not supported", start);
    const bool is_letter = (letter | 0x20) >= 'a' && (letter | 0x20) <= 'z';
    if (is_letter) {
      fail(fmt::format("the escape \\{} is not supported", static_cast<char>(letter)), start);
    }
    return letter;
  }

  char32_t unicode(std::size_t start) {
    char32_t code = 0;
    if (take("{")) {
      const std::size_t first = m_at;
      while (!at_end() && hexadecimal_digit(m_text[m_at]) >= 0 && code <= last_code_point) {
        code = code * 16 + static_cast<char32_t>(hexadecimal_digit(m_text[m_at++]));
      }
      if (m_at == first || !take("}")) fail("expected hexadecimal digits and '}'", start);
    } else {
      code = hexadecimal(4, start);
      if (code >= 0xD800 && code < 0xDC00 && take("\\u")) {
        const char32_t low = hexadecimal(4, start);
        if (low < 0xDC00 || low > 0xDFFF) fail("half of a surrogate pair", start);
        return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
      }
    }
    if (code > last_code_point) fail("no character of Unicode", start);
    if (code >= 0xD800 && code <= 0xDFFF) fail("half of a surrogate pair", start);
    return code;
  }

  Ranges property(std::size_t start, bool negated) {
    const std::size_t end = m_text.find('}', m_at);
    if (!take("{") || end == std::string_view::npos) fail("expected {…} after \\p", start);
    std::string_view name = m_text.substr(m_at, end - m_at);
    m_at = end + 1;
    for (const std::string_view prefix : {"gc=", "General_Category="}) {
      if (name.substr(0, prefix.size()) == prefix) name.remove_prefix(prefix.size());
    }
    for (const auto& [long_name, short_name] : category_names) {
      if (name != long_name && name != short_name) continue;
      // Each takes milliseconds.
      auto [known, is_new] = m_categories.try_emplace(short_name);
      if (is_new) known->second = characters_of_category(short_name);
      return negated ? complement(known->second) : known->second;
    }
    fail("expected a general category of Unicode, as in \\p{L}, \\p{Lu} or \\p{Letter}", start);
  }

  const CharacterWriter& m_write;
  std::map<std::string_view, Ranges> m_categories;
};

}  // namespace

Expr read_regular_expression(std::string_view pattern, const CharacterWriter& write,
                             Extent extent) {
  const Part all = PatternReader(pattern, write).read();
  const Expr any = repeat(write({{0, last_code_point}}), 0);
  std::vector<Expr> choices;
  for (unsigned bounds = 0; bounds < all.forms.size(); ++bounds) {
    if (all.forms[bounds].choices.empty()) continue;
    std::vector<Expr> parts = {Part::either(all.forms[bounds])};
    if (extent == Extent::search) {
      if ((bounds & Part::start) == 0) parts.insert(parts.begin(), any);
      if ((bounds & Part::end) == 0) parts.push_back(any);
    }
    choices.push_back(sequence(std::move(parts)));
  }
  return choices.empty() ? nothing() : choice(std::move(choices));
}

}  // namespace kvzap::grammar
