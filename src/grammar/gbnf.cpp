#include "grammar/gbnf.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "grammar/live_rules.hpp"
#include "grammar/text_cursor.hpp"
#include "text/utf8.hpp"

namespace kvzap::grammar {
namespace {

bool is_name_character(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
         c == '_';
}

/// Whether lines look like rules of Lark: `start: …`, `?rule: …`, `%import …`.
bool looks_like_lark(std::string_view text) {
  if (text.find("::=") != std::string_view::npos) return false;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    std::string_view line = text.substr(begin, end - begin);
    begin = end + 1;
    line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
    if (line.substr(0, 7) == "%import" || line.substr(0, 7) == "%ignore") return true;
    if (!line.empty() && (line[0] == '?' || line[0] == '!')) line.remove_prefix(1);
    std::size_t name = 0;
    while (name < line.size() && (is_name_character(line[name]) || line[name] == '.')) ++name;
    const std::size_t colon = line.find_first_not_of(" \t", name);
    if (name > 0 && colon != std::string_view::npos && line[colon] == ':') return true;
  }
  return false;
}

class GbnfReader final : TextCursor {
 public:
  explicit GbnfReader(std::string_view text) : TextCursor(text) {}

  Grammar read() {
    if (m_text.size() > max_gbnf_bytes) {
      throw Error(fmt::format("grammar: expected at most {} bytes, found {}", max_gbnf_bytes,
                              m_text.size()));
    }
    if (!text::is_valid_utf8(m_text)) throw Error("grammar: expected UTF-8");
    if (looks_like_lark(m_text)) {
      throw Error(
          "grammar: expected GBNF, found Lark's notation: write 'name ::= …' for 'name: …', "
          "name the first rule 'root', write [a-z]+ for /[a-z]+/, and add white space where "
          "%ignore leaves it out");
    }
    skip();
    while (!at_end()) rule();
    for (std::size_t i = 0; i < m_grammar.rules.size(); ++i) {
      if (!m_grammar.rules[i].body) fail(m_places[i], "no rule '" + m_grammar.rules[i].name + "'");
    }
    const auto root = m_names.find("root");
    if (root == m_names.end()) throw Error("grammar: expected a rule 'root ::= …'");
    m_grammar.root = root->second;
    if (!makes_text(m_grammar, 0, m_grammar.root)) {
      throw Error("grammar: the rule 'root' makes no text");
    }
    return std::move(m_grammar);
  }

 private:
  [[noreturn]] void fail(const std::string& message) const { fail(m_at, message); }
  [[noreturn]] void fail(std::size_t at, const std::string& message) const { fail_at(at, message); }
  [[noreturn]] void fail_at(std::size_t at, const std::string& message) const override {
    const std::string_view before = m_text.substr(0, at);
    const std::size_t line_start = before.rfind('\n') + 1;
    const auto lines = std::count(before.begin(), before.end(), '\n');
    const auto column =
        std::count_if(before.begin() + static_cast<std::ptrdiff_t>(line_start), before.end(),
                      [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; });
    throw Error(fmt::format("grammar, line {}, column {}: {}", lines + 1, column + 1, message));
  }

  /// White space and comments.
  void skip() {
    while (!at_end()) {
      if (follows("#")) {
        m_at = std::min(m_text.find('\n', m_at), m_text.size());
      } else if (follows(" ") || follows("\t") || follows("\n") || follows("\r")) {
        ++m_at;
      } else {
        break;
      }
    }
  }

  std::string_view name() {
    const std::size_t start = m_at;
    while (!at_end() && is_name_character(m_text[m_at])) ++m_at;
    return m_text.substr(start, m_at - start);
  }

  /// Whether "name ::=" follows.
  bool rule_follows() {
    const std::size_t start = m_at;
    const bool has_name = !name().empty();
    while (follows(" ") || follows("\t")) ++m_at;
    const bool result = has_name && follows("::=");
    m_at = start;
    return result;
  }

  RuleId rule_of(std::string_view rule_name, std::size_t place) {
    const auto known = m_names.find(std::string(rule_name));
    if (known != m_names.end()) return known->second;
    if (m_grammar.rules.size() == max_gbnf_rules) {
      fail(place, fmt::format("over {} rules", max_gbnf_rules));
    }
    const RuleId added = m_grammar.add(std::string(rule_name));
    m_names.emplace(rule_name, added);
    m_places.push_back(place);
    return added;
  }

  void rule() {
    const std::size_t start = m_at;
    const std::string_view rule_name = name();
    if (rule_name.empty()) fail("expected the name of a rule");
    skip();
    if (!take("::=")) fail(fmt::format("expected '::=' after '{}'", shortened(rule_name)));
    const auto defined = static_cast<std::size_t>(rule_of(rule_name, start));
    if (m_grammar.rules[defined].body) {
      fail(start, fmt::format("a second rule '{}'", shortened(rule_name)));
    }
    const Expr body = alternatives(0);
    m_grammar.rules[defined].body = body;
    if (!at_end() && !rule_follows()) fail("expected a part of a rule, or 'name ::='");
  }

  static std::string shortened(std::string_view text) { return std::string(text.substr(0, 100)); }

  Expr alternatives(int depth) {
    if (depth > max_gbnf_depth) fail(fmt::format("over {} groups in groups", max_gbnf_depth));
    std::vector<Expr> choices;
    do {
      choices.push_back(terms(depth));
    } while (take("|"));
    return choice(std::move(choices));
  }

  Expr terms(int depth) {
    std::vector<Expr> parts;
    for (skip(); !at_end() && !follows("|") && !follows(")"); skip()) {
      if (!is_name_character(m_text[m_at])) {
        const std::size_t start = m_at;
        Expr part = term(depth);
        if (!part) {
          if (depth > 0) fail("expected a part of a rule or ')'");
          m_at = start;
          break;
        }
        parts.push_back(repeated(std::move(part)));
        continue;
      }
      if (rule_follows()) break;
      const std::size_t start = m_at;
      parts.push_back(repeated(call(rule_of(name(), start))));
    }
    return sequence(std::move(parts));
  }

  /// Null if no part begins here.
  Expr term(int depth) {
    const std::size_t start = m_at;
    if (take("\"")) return text(start);
    if (take("[")) return code_point(character_class(start));
    if (take(".")) return code_point({{0, last_code_point}});
    if (follows("*") || follows("+") || follows("?") || follows("{")) fail("nothing to repeat");
    if (follows("<") || follows("!<")) fail("tokens (<…>) are not supported: use literals");
    if (!take("(")) return nullptr;
    Expr group = alternatives(depth + 1);
    if (!take(")")) fail(start, "'(' without ')'");
    return group;
  }

  Expr repeated(Expr part) {
    for (int count = 0;; ++count) {
      // As llama.cpp reads it, the operator may stand apart from its part.
      while (follows(" ") || follows("\t")) ++m_at;
      const std::size_t start = m_at;
      std::int64_t least = 0, most = unlimited;
      if (take("*")) {
      } else if (take("+")) {
        least = 1;
      } else if (take("?")) {
        most = 1;
      } else if (take("{")) {
        least = number();
        most = least;
        skip();
        if (take(",")) {
          skip();
          most = follows("}") ? unlimited : number();
          skip();
        }
        if (!take("}")) fail("expected '}' after a count");
        if (most < least) fail(start, "the counts are in the wrong order");
      } else {
        return part;
      }
      if (count == max_gbnf_depth) fail("too many operators after one part");
      part = repeat(std::move(part), least, most);
    }
  }

  std::int64_t number() {
    skip();
    return count();
  }

  Expr text(std::size_t start) {
    std::string content;
    while (!take("\"")) {
      if (at_end()) fail(start, "a literal without its end '\"'");
      text::append_utf8(content, static_cast<utf8proc_int32_t>(character()));
    }
    return literal(content);
  }

  std::vector<CodePoints> character_class(std::size_t start) {
    const bool negated = take("^");
    std::vector<CodePoints> ranges;
    while (!take("]")) {
      if (at_end()) fail(start, "'[' without ']'");
      const char32_t first = character();
      char32_t last = first;
      if (follows("-") && !follows("-]")) {
        const std::size_t dash = m_at++;
        if (at_end()) fail(start, "'[' without ']'");
        last = character();
        if (last < first) fail(dash, "a range in the wrong order");
      }
      ranges.emplace_back(first, last);
    }
    return negated ? complement(std::move(ranges)) : ranges;
  }

  char32_t character() {
    const std::size_t start = m_at;
    const auto [code, bytes] = text::first_character(m_text.substr(m_at));
    m_at += bytes;
    if (code != '\\') return static_cast<char32_t>(code);
    const char escape = at_end() ? '\0' : m_text[m_at++];
    switch (escape) {
      case 'n':
        return '\n';
      case 'r':
        return '\r';
      case 't':
        return '\t';
      case '\\':
      case '"':
      case '[':
      case ']':
        return static_cast<char32_t>(escape);
      case 'x':
        return code_of(2, start);
      case 'u':
        return code_of(4, start);
      case 'U':
        return code_of(8, start);
      default:
        fail(start,
             "expected one of the escapes \\n \\r \\t \\\\ \\\" \\[ \\] \\xHH \\uXXXX "
             "\\UXXXXXXXX");
    }
  }

  char32_t code_of(std::size_t digits, std::size_t start) {
    const char32_t value = hexadecimal(digits, start);
    if (value > last_code_point || (value >= 0xD800 && value <= 0xDFFF)) {
      fail(start, "no character of Unicode");
    }
    return value;
  }

  Grammar m_grammar;
  std::unordered_map<std::string, RuleId> m_names;
  std::vector<std::size_t> m_places;  // where each rule is first named
};

}  // namespace

Grammar read_gbnf(std::string_view text) { return GbnfReader(text).read(); }

}  // namespace kvzap::grammar
