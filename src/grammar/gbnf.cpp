#include "grammar/gbnf.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "grammar/live_rules.hpp"
#include "grammar/regular_expression.hpp"
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

class GbnfReader {
 public:
  explicit GbnfReader(std::string_view text) : text_(text) {}

  Grammar read() {
    if (text_.size() > max_gbnf_bytes) {
      throw Error(fmt::format("grammar: expected at most {} bytes, found {}", max_gbnf_bytes,
                              text_.size()));
    }
    if (!text::is_valid_utf8(text_)) throw Error("grammar: expected UTF-8");
    if (looks_like_lark(text_)) {
      throw Error(
          "grammar: expected GBNF, found Lark's notation: write 'name ::= …' for 'name: …', "
          "name the first rule 'root', write [a-z]+ for /[a-z]+/, and add white space where "
          "%ignore leaves it out");
    }
    skip();
    while (!at_end()) rule();
    for (std::size_t i = 0; i < grammar_.rules.size(); ++i) {
      if (!grammar_.rules[i].body) fail(places_[i], "no rule '" + grammar_.rules[i].name + "'");
    }
    const auto root = names_.find("root");
    if (root == names_.end()) throw Error("grammar: expected a rule 'root ::= …'");
    grammar_.root = root->second;
    if (!makes_text(grammar_, 0, grammar_.root)) {
      throw Error("grammar: the rule 'root' makes no text");
    }
    return std::move(grammar_);
  }

 private:
  [[noreturn]] void fail(const std::string& message) const { fail(at_, message); }
  [[noreturn]] void fail(std::size_t at, const std::string& message) const {
    const std::string_view before = text_.substr(0, at);
    const std::size_t line_start = before.rfind('\n') + 1;
    const auto lines = std::count(before.begin(), before.end(), '\n');
    const auto column =
        std::count_if(before.begin() + static_cast<std::ptrdiff_t>(line_start), before.end(),
                      [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; });
    throw Error(fmt::format("grammar, line {}, column {}: {}", lines + 1, column + 1, message));
  }

  bool at_end() const { return at_ == text_.size(); }
  bool follows(std::string_view text) const { return text_.substr(at_, text.size()) == text; }
  bool take(std::string_view text) {
    if (!follows(text)) return false;
    at_ += text.size();
    return true;
  }

  /// White space and comments.
  void skip() {
    while (!at_end()) {
      if (follows("#")) {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else if (follows(" ") || follows("\t") || follows("\n") || follows("\r")) {
        ++at_;
      } else {
        break;
      }
    }
  }

  std::string_view name() {
    const std::size_t start = at_;
    while (!at_end() && is_name_character(text_[at_])) ++at_;
    return text_.substr(start, at_ - start);
  }

  /// Whether "name ::=" follows.
  bool rule_follows() {
    const std::size_t start = at_;
    const bool has_name = !name().empty();
    while (follows(" ") || follows("\t")) ++at_;
    const bool result = has_name && follows("::=");
    at_ = start;
    return result;
  }

  RuleId rule_of(std::string_view rule_name, std::size_t place) {
    const auto known = names_.find(std::string(rule_name));
    if (known != names_.end()) return known->second;
    if (grammar_.rules.size() == max_gbnf_rules) {
      fail(place, fmt::format("over {} rules", max_gbnf_rules));
    }
    const RuleId added = grammar_.add(std::string(rule_name));
    names_.emplace(rule_name, added);
    places_.push_back(place);
    return added;
  }

  void rule() {
    const std::size_t start = at_;
    const std::string_view rule_name = name();
    if (rule_name.empty()) fail("expected the name of a rule");
    skip();
    if (!take("::=")) fail(fmt::format("expected '::=' after '{}'", shortened(rule_name)));
    const auto defined = static_cast<std::size_t>(rule_of(rule_name, start));
    if (grammar_.rules[defined].body) {
      fail(start, fmt::format("a second rule '{}'", shortened(rule_name)));
    }
    const Expr body = alternatives(0);
    grammar_.rules[defined].body = body;
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
      if (!is_name_character(text_[at_])) {
        const std::size_t start = at_;
        Expr part = term(depth);
        if (!part) {
          if (depth > 0) fail("expected a part of a rule or ')'");
          at_ = start;
          break;
        }
        parts.push_back(repeated(std::move(part)));
        continue;
      }
      if (rule_follows()) break;
      const std::size_t start = at_;
      parts.push_back(repeated(call(rule_of(name(), start))));
    }
    return sequence(std::move(parts));
  }

  /// Null if no part begins here.
  Expr term(int depth) {
    const std::size_t start = at_;
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
      while (follows(" ") || follows("\t")) ++at_;
      const std::size_t start = at_;
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
    const std::size_t start = at_;
    std::int64_t value = 0;
    for (; !at_end() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
      value = value * 10 + (text_[at_] - '0');
      if (value > max_repeat_count) {
        fail(start, fmt::format("expected counts up to {}", max_repeat_count));
      }
    }
    if (at_ == start) fail("expected a count");
    return value;
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
        const std::size_t dash = at_++;
        if (at_end()) fail(start, "'[' without ']'");
        last = character();
        if (last < first) fail(dash, "a range in the wrong order");
      }
      ranges.emplace_back(first, last);
    }
    return negated ? complement(std::move(ranges)) : ranges;
  }

  char32_t character() {
    const std::size_t start = at_;
    const auto [code, bytes] = text::first_character(text_.substr(at_));
    at_ += bytes;
    if (code != '\\') return static_cast<char32_t>(code);
    const char escape = at_end() ? '\0' : text_[at_++];
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
        return hexadecimal(2, start);
      case 'u':
        return hexadecimal(4, start);
      case 'U':
        return hexadecimal(8, start);
      default:
        fail(start,
             "expected one of the escapes \\n \\r \\t \\\\ \\\" \\[ \\] \\xHH \\uXXXX "
             "\\UXXXXXXXX");
    }
  }

  char32_t hexadecimal(int count, std::size_t start) {
    std::uint64_t value = 0;
    for (int i = 0; i < count; ++i, ++at_) {
      const char c = at_end() ? '\0' : text_[at_];
      const char lower = static_cast<char>(c | 0x20);
      if (c >= '0' && c <= '9') {
        value = value * 16 + static_cast<std::uint64_t>(c - '0');
      } else if (lower >= 'a' && lower <= 'f') {
        value = value * 16 + static_cast<std::uint64_t>(lower - 'a' + 10);
      } else {
        fail(start, fmt::format("expected {} hexadecimal digits", count));
      }
    }
    if (value > last_code_point || (value >= 0xD800 && value <= 0xDFFF)) {
      fail(start, "no character of Unicode");
    }
    return static_cast<char32_t>(value);
  }

  std::string_view text_;
  std::size_t at_ = 0;
  Grammar grammar_;
  std::unordered_map<std::string, RuleId> names_;
  std::vector<std::size_t> places_;  // where each rule is first named
};

}  // namespace

Grammar read_gbnf(std::string_view text) { return GbnfReader(text).read(); }

}  // namespace kvzap::grammar
