#include "kvzap/model/chat_template.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "base/json_file.hpp"
#include "base/quote.hpp"
#include "kvzap/core/types.hpp"
#include "text/utf8.hpp"

namespace kvzap {
namespace {

using Json = nlohmann::json;

constexpr std::string_view raw_hint =
    "; --raw feeds the prompt to the model without a chat template";

[[noreturn]] void fail(const std::string& where, std::string_view expected,
                       std::string_view found) {
  throw Error(fmt::format("{}: expected {}, found {}{}", where, expected, detail::shown(found, 300),
                          raw_hint));
}

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
bool is_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}
bool starts_with(std::string_view text, std::string_view start) {
  return text.substr(0, start.size()) == start;
}
bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}
bool is_one_of(std::string_view text, std::initializer_list<std::string_view> values) {
  return std::find(values.begin(), values.end(), text) != values.end();
}

// White space as Jinja sees it around tags, and Python's str.strip(), which is its trim. (Inside
// tags is_space is enough: what it does not know is a symbol there, and refused.)
constexpr std::string_view spaces[] = {" ",      "\t",     "\n",     "\v",     "\f",     "\r",
                                       "\x1C",   "\x1D",   "\x1E",   "\x1F",   "\u0085", "\u00A0",
                                       "\u1680", "\u2000", "\u2001", "\u2002", "\u2003", "\u2004",
                                       "\u2005", "\u2006", "\u2007", "\u2008", "\u2009", "\u200A",
                                       "\u2028", "\u2029", "\u202F", "\u205F", "\u3000"};

std::string_view left_trimmed(std::string_view text) {
  const auto leads = [&](std::string_view space) { return starts_with(text, space); };
  for (;;) {
    const auto found = std::find_if(std::begin(spaces), std::end(spaces), leads);
    if (found == std::end(spaces)) return text;
    text.remove_prefix(found->size());
  }
}

std::string_view right_trimmed(std::string_view text) {
  const auto ends = [&](std::string_view space) { return ends_with(text, space); };
  for (;;) {
    const auto found = std::find_if(std::begin(spaces), std::end(spaces), ends);
    if (found == std::end(spaces)) return text;
    text.remove_suffix(found->size());
  }
}

std::string_view trimmed(std::string_view text) { return right_trimmed(left_trimmed(text)); }

// Templates of published models have at most 20 KB, and what they write has less. Without limits a
// few lines that double a variable take all memory.
constexpr std::size_t max_template_bytes = 128u << 10;
constexpr std::size_t max_text_bytes = 4u << 20;
// Nor may thousands of statements copy such texts for minutes.
constexpr std::size_t max_copied_bytes = 64u << 20;

// A string literal as canonical expressions have it: double quotes; \n, \" and \\ escaped.
std::string quote_literal(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '\n') {
      result += "\\n";
    } else {
      if (c == '"' || c == '\\') result += '\\';
      result += c;
    }
  }
  return result + '"';
}

// ---- Canonical Jinja ----------------------------------------------------------------------------

struct Token {
  enum Kind { literal, name, symbol } kind;
  std::string text;  // of a literal: the value
};

// Appends what Python's literals mean by the escape whose backslash is before source[i], and puts i
// on its last character. False for one that names a character, and for what is none in Python.
bool append_escape(std::string_view source, std::size_t& i, std::string& value) {
  constexpr std::string_view letters = "abfnrtv\\'\"", values = "\a\b\f\n\r\t\v\\'\"";
  const char c = source[i];
  if (const std::size_t found = letters.find(c); found != letters.npos) {
    value += values[found];
    return true;
  }
  if (c == '\n') return true;  // a line goes on
  const bool is_octal = c >= '0' && c <= '7';
  const std::size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
  if (!is_octal && digits == 0) {
    value += '\\';
    value += c;
    return c != 'N' && static_cast<unsigned char>(c) < 0x80;
  }
  std::int64_t codepoint = 0;
  if (is_octal) {
    std::size_t end = i;
    for (; end < std::min(i + 3, source.size()) && source[end] >= '0' && source[end] <= '7';
         ++end) {
      codepoint = codepoint * 8 + (source[end] - '0');
    }
    i = end - 1;
  } else {
    for (std::size_t k = 1; k <= digits; ++k) {
      const char d = i + k < source.size() ? source[i + k] : '\0';
      const bool is_digit = d >= '0' && d <= '9';
      const char lower = static_cast<char>(d | 0x20);
      if (!is_digit && (lower < 'a' || lower > 'f')) return false;
      codepoint = codepoint * 16 + (is_digit ? d - '0' : lower - 'a' + 10);
    }
    i += digits;
  }
  if (codepoint > 0x10FFFF || (codepoint >= 0xD800 && codepoint < 0xE000)) return false;
  detail::append_utf8(value, static_cast<utf8proc_int32_t>(codepoint));
  return true;
}

// Reads the tokens of an expression. Operators come one character at a time, `~` as `+`.
// Returns nothing for an unclosed literal.
std::optional<std::vector<Token>> expression_tokens(std::string_view source) {
  std::vector<Token> tokens;
  for (std::size_t i = 0; i < source.size();) {
    const char c = source[i];
    if (is_space(c)) {
      ++i;
    } else if (c == '"' || c == '\'') {
      std::string value;
      for (++i; i < source.size() && source[i] != c; ++i) {
        if (source[i] == '\\' && i + 1 < source.size()) {
          ++i;
          if (!append_escape(source, i, value)) return std::nullopt;
        } else {
          value += source[i];
        }
      }
      if (i == source.size()) return std::nullopt;
      ++i;
      tokens.push_back({Token::literal, std::move(value)});
    } else if (is_name(c)) {
      std::size_t end = i;
      while (end < source.size() && is_name(source[end])) ++end;
      tokens.push_back({Token::name, std::string(source.substr(i, end - i))});
      i = end;
    } else {
      tokens.push_back({Token::symbol, std::string(1, c == '~' ? '+' : c)});
      ++i;
    }
  }
  return tokens;
}

bool is_symbol(const std::vector<Token>& tokens, std::size_t index, char symbol) {
  return index < tokens.size() && tokens[index].kind == Token::symbol &&
         tokens[index].text[0] == symbol;
}

// Turns x["key"] into x.key and x[0] into x.0, and drops parentheses around everything.
std::vector<Token> simplified(const std::vector<Token>& tokens) {
  std::vector<Token> result;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const bool subscript =
        is_symbol(tokens, i, '[') && is_symbol(tokens, i + 2, ']') && !result.empty() &&
        result.back().kind == Token::name && tokens[i + 1].kind != Token::symbol &&
        !tokens[i + 1].text.empty() &&
        std::all_of(tokens[i + 1].text.begin(), tokens[i + 1].text.end(), is_name);
    if (subscript) {
      result.push_back({Token::symbol, "."});
      result.push_back({Token::name, tokens[i + 1].text});
      i += 2;
    } else {
      result.push_back(tokens[i]);
    }
  }
  const auto wrapped = [&] {
    if (!is_symbol(result, 0, '(')) return false;
    int depth = 0;
    for (std::size_t i = 0; i < result.size(); ++i) {
      if (is_symbol(result, i, '(')) ++depth;
      if (is_symbol(result, i, ')') && --depth == 0) return i + 1 == result.size();
    }
    return false;
  };
  if (wrapped()) {
    result.pop_back();
    result.erase(result.begin());
  }
  return result;
}

std::string spelled(const std::vector<Token>& tokens) {
  std::string result;
  for (const Token& token : tokens) {
    const std::string text = token.kind == Token::literal ? quote_literal(token.text) : token.text;
    if (!result.empty() && is_name(result.back()) && is_name(text.front())) result += ' ';
    result += text;
  }
  return result;
}

// What a template consists of: outputs (with the text between tags as literals) and statements.
struct Node {
  enum Kind { output, statement } kind;
  std::vector<Token> tokens;
};

// Splits a template into nodes, with the white-space rules of transformers' environment:
// trim_blocks and lstrip_blocks. Returns nothing for an unclosed tag.
std::optional<std::vector<Node>> parse(std::string_view source) {
  if (ends_with(source, "\n")) source.remove_suffix(1);
  std::vector<Node> nodes;
  bool strip_left = false;   // the tag before ended with -
  bool after_block = false;  // it was a statement or comment: trim_blocks
  bool line_start = true;    // the text begins a line
  std::size_t position = 0;
  while (position < source.size()) {
    std::size_t tag = position;
    while (tag < source.size() && !(source[tag] == '{' && tag + 1 < source.size() &&
                                    is_one_of(source.substr(tag + 1, 1), {"{", "%", "#"}))) {
      ++tag;
    }
    std::string_view text = source.substr(position, tag - position);
    const char kind = tag < source.size() ? source[tag + 1] : '\0';
    const char control = kind != '\0' && tag + 2 < source.size() ? source[tag + 2] : '\0';
    if (strip_left) {
      text = left_trimmed(text);
    } else if (after_block && starts_with(text, "\n")) {
      text.remove_prefix(1);
      line_start = true;
    }
    if (control == '-') {
      text = right_trimmed(text);
    } else if ((kind == '%' || kind == '#') && control != '+') {
      const std::size_t newline = text.rfind('\n');
      const std::size_t begin = newline == std::string_view::npos ? 0 : newline + 1;
      const std::string_view indent = text.substr(begin);
      if ((begin > 0 || line_start) && left_trimmed(indent).empty()) {
        text = text.substr(0, begin);
      }
    }
    if (!text.empty()) nodes.push_back({Node::output, {{Token::literal, std::string(text)}}});
    if (kind == '\0') break;

    const std::string close = kind == '{' ? "}}" : std::string{kind, '}'};
    const bool has_control = control == '-' || control == '+';
    const std::size_t begin = tag + (has_control ? 3 : 2);
    std::size_t end = begin;
    for (char quote = '\0'; end < source.size(); ++end) {
      const char c = source[end];
      if (quote != '\0') {
        if (c == '\\') ++end;
        if (c == quote) quote = '\0';
      } else if (kind != '#' && (c == '"' || c == '\'')) {
        quote = c;
      } else if (starts_with(source.substr(end), close)) {
        break;
      }
    }
    if (end >= source.size()) return std::nullopt;
    std::string_view body = source.substr(begin, end - begin);
    strip_left = ends_with(body, "-");
    after_block = kind != '{' && !ends_with(body, "+");
    if (strip_left || ends_with(body, "+")) body.remove_suffix(1);
    line_start = false;
    position = end + 2;
    if (kind != '#') {
      const auto tokens = expression_tokens(body);
      if (!tokens) return std::nullopt;
      nodes.push_back({kind == '{' ? Node::output : Node::statement, simplified(*tokens)});
    }
  }
  return nodes;
}

// ---- What is put out for one user message -------------------------------------------------------

enum class Truth { no, yes, unknown };

Truth truth_of(bool value) { return value ? Truth::yes : Truth::no; }

// A text that is known up to the user's message.
struct Part {
  enum Kind { literal, content, trimmed_content } kind;
  std::string text;
};

struct Value {
  enum Kind { unknown, boolean, messages, text } kind = unknown;
  bool truth = false;
  std::vector<Part> parts;

  static Value of(std::string literal) {
    return {text, false, {{Part::literal, std::move(literal)}}};
  }
  // The text if all of it is known.
  std::optional<std::string> constant() const {
    if (kind != text) return std::nullopt;
    std::string result;
    for (const Part& part : parts) {
      if (part.kind != Part::literal) return std::nullopt;
      result += part.text;
    }
    return result;
  }
};

// What it takes in memory, about.
std::size_t bytes_of(const Value& value) {
  std::size_t bytes = 0;
  for (const Part& part : value.parts) bytes += sizeof(Part) + part.text.size();
  return bytes;
}

using Tokens = std::vector<Token>;
using Iterator = Tokens::const_iterator;

// Runs a template on one user message as far as its text is known. Each condition that decides
// about output must be known too, so that nothing is ever guessed.
class Evaluator {
 public:
  Evaluator(const std::vector<Node>& nodes, const std::optional<std::string>& bos_token,
            bool thinking)
      : m_nodes(nodes), m_thinking(thinking) {
    if (bos_token) {
      m_variables["bos_token"] = Value::of(*bos_token);
      m_variable_bytes = bytes_of(m_variables["bos_token"]);
    }
    Value messages;
    messages.kind = Value::messages;
    m_variables["messages"] = messages;
  }

  // Nothing if something is not understood: problem() then says what.
  std::optional<std::vector<Part>> run() {
    for (const Node& node : m_nodes) {
      if (node.kind == Node::output) {
        output(node.tokens);
      } else {
        statement(node.tokens);
      }
      if (m_copied_bytes > max_copied_bytes) {
        m_problem = fmt::format("one that copies more than {} bytes", max_copied_bytes);
      }
      if (!m_problem.empty()) return std::nullopt;
    }
    if (!m_blocks.empty()) {
      m_problem = "an unclosed " + m_blocks.back().keyword;
      return std::nullopt;
    }
    return std::move(m_result);
  }

  const std::string& problem() const { return m_problem; }

 private:
  struct Block {
    std::string keyword;
    Truth runs;     // whether the current branch runs
    Truth earlier;  // whether an earlier branch of the same if has run
    // Of a loop: variables as they were before each assignment, which the loop's end takes back.
    std::vector<std::pair<std::string, std::optional<Value>>> before;
  };

  Truth live() const {
    Truth result = Truth::yes;
    for (const Block& block : m_blocks) {
      if (block.runs == Truth::no) return Truth::no;
      if (block.runs == Truth::unknown) result = Truth::unknown;
    }
    return result;
  }

  void output(const Tokens& tokens) {
    const Truth truth = live();
    if (truth == Truth::no) return;
    const Value value = evaluate(tokens.begin(), tokens.end());
    if (truth == Truth::unknown) {
      m_problem =
          fmt::format("the output {} under the condition {}", spelled(tokens), m_unknown_condition);
    } else if (value.kind != Value::text) {
      m_problem = "the output " + spelled(tokens);
    } else {
      m_result_bytes += bytes_of(value);
      if (m_result_bytes > max_text_bytes) {
        m_problem = fmt::format("an output of more than {} bytes", max_text_bytes);
        return;
      }
      m_result.insert(m_result.end(), value.parts.begin(), value.parts.end());
    }
  }

  void statement(const Tokens& tokens) {
    if (tokens.empty()) {
      m_problem = "an empty statement";
      return;
    }
    const std::string& keyword = tokens[0].text;
    const Iterator begin = tokens.begin() + 1, end = tokens.end();
    if (keyword == "if") {
      const Truth truth = condition(begin, end);
      m_blocks.push_back({keyword, truth, truth, {}});
    } else if (keyword == "for") {
      m_blocks.push_back({keyword, loop(Tokens(begin, end)), Truth::no, {}});
    } else if (keyword == "elif" || keyword == "else") {
      if (m_blocks.empty() || m_blocks.back().keyword != "if") {
        m_problem = fmt::format("\"{}\" outside an if", keyword);
        return;
      }
      Block& block = m_blocks.back();
      const Truth truth = keyword == "else" ? Truth::yes : condition(begin, end);
      block.runs = both(negation(block.earlier), truth);
      block.earlier = negation(both(negation(block.earlier), negation(truth)));
    } else if (keyword == "endif" || keyword == "endfor") {
      if (m_blocks.empty() || m_blocks.back().keyword != keyword.substr(3)) {
        m_problem = fmt::format("\"{}\" without its beginning", keyword);
        return;
      }
      auto& before = m_blocks.back().before;
      for (auto change = before.rbegin(); change != before.rend(); ++change) {
        m_variable_bytes -= bytes_of(m_variables[change->first]);
        if (change->second) {
          m_variables[change->first] = std::move(*change->second);
        } else {
          m_variables.erase(change->first);
        }
      }
      m_blocks.pop_back();
    } else if (live() != Truth::no) {
      if (keyword == "set" && tokens.size() > 3) {
        assignment(tokens);
      } else {
        m_problem = fmt::format("the statement \"{}\"", spelled(tokens));
      }
    }
  }

  // A loop over the messages runs once, for the user's.
  Truth loop(const Tokens& tokens) {
    const bool over_messages = tokens.size() >= 3 && tokens[0].text == "message" &&
                               tokens[1].text == "in" &&
                               value_of(tokens[2].text).kind == Value::messages;
    const std::string direction =
        spelled(Tokens(tokens.begin() + std::min<std::size_t>(3, tokens.size()), tokens.end()));
    if (over_messages && (direction.empty() || direction == "[::-1]")) return Truth::yes;
    m_unknown_condition = "\"for " + spelled(tokens) + "\"";
    return Truth::unknown;
  }

  void assignment(const Tokens& tokens) {
    // Attributes (of a namespace) are never read: values that depend on them stay unknown.
    if (!is_symbol(tokens, 2, '=')) {
      if (!is_symbol(tokens, 2, '.'))
        m_problem = fmt::format("the statement \"{}\"", spelled(tokens));
      return;
    }
    const std::string& name = tokens[1].text;
    // What transformers gives the template is known by its name.
    if (is_one_of(name, {"message", "messages", "loop", "tools", "add_generation_prompt",
                         "enable_thinking"})) {
      m_problem = fmt::format("the statement \"{}\"", spelled(tokens));
      return;
    }
    Value value = live() == Truth::yes ? evaluate(tokens.begin() + 3, tokens.end()) : Value{};
    const auto [known, is_new] = m_variables.try_emplace(name);
    Value& variable = known->second;
    const auto inside = std::find_if(m_blocks.rbegin(), m_blocks.rend(),
                                     [](const Block& block) { return block.keyword == "for"; });
    m_variable_bytes += bytes_of(value);
    if (inside == m_blocks.rend()) {
      m_variable_bytes -= bytes_of(variable);
    } else {
      m_copied_bytes += bytes_of(variable);
      inside->before.emplace_back(name, is_new ? std::nullopt : std::optional(variable));
    }
    if (m_variable_bytes > max_text_bytes) {
      m_problem = fmt::format("the variable \"{}\", with which all of them have more than {} bytes",
                              detail::shown(name), max_text_bytes);
      return;
    }
    variable = std::move(value);
  }

  Value value_of(const std::string& name) const {
    const auto found = m_variables.find(name);
    if (found == m_variables.end() || m_copied_bytes > max_copied_bytes) return {};
    m_copied_bytes += bytes_of(found->second);
    return found->second;
  }

  // A sum of texts, a boolean or the list of messages.
  Value evaluate(Iterator begin, Iterator end) const {
    const auto plus = [&](Iterator from) {
      return std::find_if(from, end,
                          [](const Token& t) { return t.kind == Token::symbol && t.text == "+"; });
    };
    Value sum = term(begin, plus(begin));
    std::size_t sum_bytes = bytes_of(sum);
    for (Iterator next = plus(begin); next != end; next = plus(next + 1)) {
      const Value right = term(next + 1, plus(next + 1));
      if (sum.kind != Value::text || right.kind != Value::text) return {};
      sum_bytes += bytes_of(right);
      if (sum_bytes > max_text_bytes) return {};
      sum.parts.insert(sum.parts.end(), right.parts.begin(), right.parts.end());
    }
    return sum;
  }

  Value term(Iterator begin, Iterator end) const {
    if (end - begin == 1 && begin->kind == Token::literal) return Value::of(begin->text);
    std::string text = spelled(Tokens(begin, end));
    bool trim = false;
    for (const std::string_view suffix : {"|trim", ".strip()"}) {
      if (ends_with(text, suffix)) {
        trim = true;
        text.resize(text.size() - suffix.size());
        break;
      }
    }
    Value value;
    if (is_one_of(text, {"message.content", "messages.0.content"})) {
      value = {Value::text, false, {{Part::content, ""}}};
    } else if (is_one_of(text, {"message.role", "messages.0.role"})) {
      value = Value::of("user");
    } else if (is_one_of(text, {"true", "True", "false", "False"})) {
      value.kind = Value::boolean;
      value.truth = is_one_of(text, {"true", "True"});
    } else {
      value = value_of(text);
    }
    if (!trim) return value;
    if (value.kind != Value::text || value.parts.size() != 1 ||
        value.parts[0].kind == Part::literal) {
      return {};
    }
    value.parts[0].kind = Part::trimmed_content;
    return value;
  }

  static Truth negation(Truth truth) {
    return truth == Truth::unknown ? truth : truth_of(truth == Truth::no);
  }
  static Truth both(Truth a, Truth b) {
    if (a == Truth::no || b == Truth::no) return Truth::no;
    return a == Truth::yes && b == Truth::yes ? Truth::yes : Truth::unknown;
  }

  Truth condition(Iterator begin, Iterator end) {
    const Truth truth = disjunction(begin, end, 0);
    if (truth == Truth::unknown) {
      m_unknown_condition = "\"if " + spelled(Tokens(begin, end)) + "\"";
    }
    return truth;
  }

  // The next token `keyword` outside parentheses, or end.
  static Iterator find_keyword(Iterator begin, Iterator end, std::string_view keyword) {
    int depth = 0;
    for (; begin != end; ++begin) {
      if (begin->kind == Token::symbol && begin->text == "(") ++depth;
      if (begin->kind == Token::symbol && begin->text == ")") --depth;
      if (depth == 0 && begin->kind == Token::name && begin->text == keyword) return begin;
    }
    return end;
  }

  Truth disjunction(Iterator begin, Iterator end, int depth) const {
    const Iterator next = find_keyword(begin, end, "or");
    const Truth left = conjunction(begin, next, depth);
    if (next == end || left == Truth::yes) return left;
    const Truth right = depth < max_depth ? disjunction(next + 1, end, depth + 1) : Truth::unknown;
    return negation(both(negation(left), negation(right)));
  }

  Truth conjunction(Iterator begin, Iterator end, int depth) const {
    const Iterator next = find_keyword(begin, end, "and");
    const Truth left = inversion(begin, next, depth);
    if (next == end || left == Truth::no) return left;
    return both(left, depth < max_depth ? conjunction(next + 1, end, depth + 1) : Truth::unknown);
  }

  Truth inversion(Iterator begin, Iterator end, int depth) const {
    if (begin == end || depth >= max_depth) return Truth::unknown;
    if (begin->kind == Token::name && begin->text == "not") {
      return negation(inversion(begin + 1, end, depth + 1));
    }
    const Iterator last = end - 1;
    if (begin->text == "(" && last->text == ")" && find_closing(begin, end) == last) {
      return disjunction(begin + 1, last, depth + 1);
    }
    return atom(begin, end);
  }

  static Iterator find_closing(Iterator begin, Iterator end) {
    int depth = 0;
    for (; begin != end; ++begin) {
      if (begin->kind != Token::symbol) continue;
      if (begin->text == "(") ++depth;
      if (begin->text == ")" && --depth == 0) return begin;
    }
    return end;
  }

  Truth atom(Iterator begin, Iterator end) const {
    const Tokens tokens(begin, end);
    // Comparisons of texts.
    for (std::size_t i = 1; i + 2 < tokens.size(); ++i) {
      const bool equal = is_symbol(tokens, i, '=');
      if (!(equal || is_symbol(tokens, i, '!')) || !is_symbol(tokens, i + 1, '=')) continue;
      const auto left = evaluate(begin, begin + i).constant();
      const auto right = evaluate(begin + i + 2, end).constant();
      if (left && right) return truth_of((*left == *right) == equal);
      break;
    }
    const std::string text = spelled(tokens);
    const auto without = [&](std::string_view suffix) -> std::optional<std::string> {
      if (!ends_with(text, suffix)) return std::nullopt;
      return text.substr(0, text.size() - suffix.size());
    };
    if (const auto name = without(" is not defined")) return negation(is_defined(*name));
    if (const auto name = without(" is defined")) return is_defined(*name);
    if (is_one_of(text, {"tools is none", "not tools", "loop.first", "loop.last", "loop.index0==0",
                         "add_generation_prompt", "message.content is string",
                         "messages.0.content is string"})) {
      return Truth::yes;
    }
    if (is_one_of(text,
                  {"tools", "tools is not none", "message.tool_calls", "message.reasoning_content",
                   "\"tool_calls\"in message", "message.reasoning_content is string"})) {
      return Truth::no;
    }
    if (is_one_of(text, {"enable_thinking", "enable_thinking is true"})) {
      return truth_of(m_thinking);
    }
    if (text == "enable_thinking is false") return truth_of(!m_thinking);
    const Value value = value_of(text);
    return value.kind == Value::boolean ? truth_of(value.truth) : Truth::unknown;
  }

  // transformers passes the messages, tools (none) and the settings it is called with.
  // strftime_now, which it also passes, is taken to be missing: see ChatTemplate::parts.
  Truth is_defined(const std::string& name) const {
    if (name.empty() ||
        (!std::all_of(name.begin(), name.end(), is_name) && !starts_with(name, "message."))) {
      return Truth::unknown;
    }
    return truth_of(m_variables.count(name) != 0 ||
                    is_one_of(name, {"tools", "add_generation_prompt", "enable_thinking", "message",
                                     "message.role", "message.content"}));
  }

  static constexpr int max_depth = 64;

  const std::vector<Node>& m_nodes;
  const bool m_thinking;
  std::map<std::string, Value> m_variables;
  std::vector<Block> m_blocks;
  std::vector<Part> m_result;
  std::size_t m_variable_bytes = 0;
  std::size_t m_result_bytes = 0;
  mutable std::size_t m_copied_bytes = 0;  // of variables
  std::string m_unknown_condition;
  std::string m_problem;
};

ChatTemplate::Parts parts_of(const std::string& where, const std::vector<Node>& nodes,
                             const std::optional<std::string>& bos_token, bool thinking) {
  Evaluator evaluator(nodes, bos_token, thinking);
  const auto pieces = evaluator.run();
  if (!pieces) fail(where, "a chat template of a known kind", evaluator.problem());
  ChatTemplate::Parts parts;
  bool content_seen = false;
  for (const Part& piece : *pieces) {
    if (piece.kind == Part::literal) {
      (content_seen ? parts.suffix : parts.prefix) += piece.text;
    } else if (content_seen) {
      fail(where, "a chat template of a known kind", "one that repeats the message");
    } else {
      content_seen = true;
      parts.trim_content = piece.kind == Part::trimmed_content;
    }
  }
  if (!content_seen) {
    fail(where, "a chat template of a known kind", "one that leaves the message out");
  }
  return parts;
}

ChatFormat format_of(const std::string& where, const ChatTemplate::Parts& thinking,
                     const ChatTemplate::Parts& no_thinking) {
  constexpr std::string_view chatml_prefix = "<|im_start|>user\n";
  constexpr std::string_view chatml_suffix = "<|im_end|>\n<|im_start|>assistant\n";
  constexpr std::string_view llama_prefix = "<|start_header_id|>user<|end_header_id|>\n\n";
  constexpr std::string_view llama_suffix =
      "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n";
  if (ends_with(no_thinking.prefix, chatml_prefix) &&
      starts_with(no_thinking.suffix, chatml_suffix)) {
    if (no_thinking.suffix != thinking.suffix) return ChatFormat::qwen3;
    return no_thinking.prefix == chatml_prefix ? ChatFormat::chatml : ChatFormat::qwen2;
  }
  if (ends_with(no_thinking.prefix, llama_prefix) && no_thinking.suffix == llama_suffix) {
    return ChatFormat::llama3;
  }
  fail(where, "a ChatML, Qwen or Llama 3 template",
       fmt::format("one that puts {} before the message and {} behind it",
                   quote_literal(no_thinking.prefix), quote_literal(no_thinking.suffix)));
}

// ---- Files --------------------------------------------------------------------------------------

// What `read` makes of a file; its errors say what to do without the file.
template <class Read>
auto with_hint(Read read) {
  try {
    return read();
  } catch (const Error& error) {
    throw Error(std::string(error.what()) + std::string(raw_hint));
  }
}

// Nothing if there is no such file.
std::optional<std::string> read_file(const std::filesystem::path& path, std::size_t max_bytes) {
  if (!std::filesystem::is_regular_file(path)) return std::nullopt;
  return with_hint([&] { return detail::read_text_file(path, max_bytes); });
}

// Jinja takes \r\n and \r for \n.
std::string with_plain_newlines(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool is_pair = text[i] == '\r' && i + 1 < text.size() && text[i + 1] == '\n';
    if (!is_pair) result += text[i] == '\r' ? '\n' : text[i];
  }
  return result;
}

const Json* member(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

const std::string& string_at(const Json& value, const std::string& where) {
  if (!value.is_string()) fail(where, "a string", value.type_name());
  return value.get_ref<const std::string&>();
}

// The template of tokenizer_config.json, if it has one.
std::optional<std::string> configured_template(const Json& config, const std::string& where) {
  const Json* const field = member(config, "chat_template");
  if (field == nullptr) return std::nullopt;
  if (!field->is_array()) return string_at(*field, where);
  for (const Json& entry : *field) {
    if (!entry.is_object()) fail(where, "objects with a name and a template", entry.type_name());
    const Json* const name = member(entry, "name");
    const Json* const text = member(entry, "template");
    if (name == nullptr || text == nullptr) {
      fail(where, "objects with a name and a template", "an object without");
    }
    if (*name == "default") return string_at(*text, where + "[default]");
  }
  fail(where, "a template named \"default\"", "none");
}

// ---- Conversations ------------------------------------------------------------------------------

std::string opening_of(ChatFormat format, ChatRole role) {
  return format == ChatFormat::llama3
             ? fmt::format("<|start_header_id|>{}<|end_header_id|>\n\n", name_of(role))
             : fmt::format("<|im_start|>{}\n", name_of(role));
}

std::string_view end_of_message(ChatFormat format) {
  return format == ChatFormat::llama3 ? "<|eot_id|>" : "<|im_end|>\n";
}

std::string without_newlines(std::string_view text, bool at_begin, bool at_end) {
  while (at_begin && starts_with(text, "\n")) text.remove_prefix(1);
  while (at_end && ends_with(text, "\n")) text.remove_suffix(1);
  return std::string(text);
}

// An assistant's message as Qwen3's template takes it apart.
struct QwenAnswer {
  std::string thoughts;
  std::string text;
};

QwenAnswer qwen_answer(std::string_view content) {
  constexpr std::string_view begin = "<think>", end = "</think>";
  const std::size_t first = content.find(end);
  if (first == std::string_view::npos) return {"", std::string(content)};
  const std::string before = without_newlines(content.substr(0, first), false, true);
  const std::size_t opened = before.rfind(begin);
  const std::string_view thoughts =
      std::string_view(before).substr(opened == std::string::npos ? 0 : opened + begin.size());
  return {without_newlines(thoughts, true, true),
          without_newlines(content.substr(content.rfind(end) + end.size()), true, false)};
}

// Of a tool, in the user's name: no question by Qwen3's template.
bool is_tool_response(std::string_view content) {
  return starts_with(content, "<tool_response>") && ends_with(content, "</tool_response>");
}

}  // namespace

std::string_view name_of(ChatRole role) {
  switch (role) {
    case ChatRole::system:
      return "system";
    case ChatRole::user:
      return "user";
    case ChatRole::assistant:
      return "assistant";
  }
  return "unknown";
}

std::string ChatTemplate::Parts::prompt(std::string_view user_text) const {
  if (trim_content) user_text = trimmed(user_text);
  return prefix + std::string(user_text) + suffix;
}

std::string ChatTemplate::Parts::context(std::string_view user_text) const {
  // A template that trims its message does so where the context begins. Where the context ends the
  // message goes on, as in kvpress: a mark stands in for what follows.
  const Parts before{prefix, "", trim_content};
  std::string context = before.prompt(std::string(user_text) + "|");
  context.pop_back();
  return context;
}

ChatTemplate ChatTemplate::detect(const std::filesystem::path& folder) {
  const std::filesystem::path template_path = folder / "chat_template.jinja";
  const std::filesystem::path config_path = folder / "tokenizer_config.json";

  Json config = Json::object();
  if (std::filesystem::is_regular_file(config_path)) {
    config = with_hint([&] {
      return detail::parse_json(detail::read_text_file(config_path), config_path.string());
    });
    if (!config.is_object()) fail(config_path.string(), "an object", config.type_name());
  }

  std::string where = template_path.string();
  std::optional<std::string> source = read_file(template_path, max_template_bytes);
  if (!source) {
    where = config_path.string() + ": chat_template";
    source = configured_template(config, where);
  }
  if (!source)
    fail(folder.string(), "chat_template.jinja or a chat_template in tokenizer_config.json",
         "neither");

  std::optional<std::string> bos_token;
  if (const Json* field = member(config, "bos_token")) {
    const std::string bos_where = config_path.string() + ": bos_token";
    if (field->is_object()) {
      const Json* const content = member(*field, "content");
      if (content == nullptr) fail(bos_where, "a content", "none");
      field = content;
    }
    bos_token = string_at(*field, bos_where);
  }

  if (source->size() > max_template_bytes) {
    fail(where, fmt::format("a template of at most {} bytes", max_template_bytes),
         fmt::format("one of {}", source->size()));
  }
  if (!detail::is_valid_utf8(*source)) fail(where, "a template in UTF-8", "something else");

  const auto nodes = parse(with_plain_newlines(*source));
  if (!nodes) fail(where, "a Jinja template", "an unclosed tag or literal");
  ChatTemplate result;
  result.m_thinking = parts_of(where, *nodes, bos_token, true);
  result.m_no_thinking = parts_of(where, *nodes, bos_token, false);
  result.m_format = format_of(where, result.m_thinking, result.m_no_thinking);
  return result;
}

ChatTemplate::Parts ChatTemplate::parts(bool thinking) const {
  return thinking ? m_thinking : m_no_thinking;
}

ChatTemplate::Parts ChatTemplate::parts(bool thinking, std::string_view system) const {
  Parts result = parts(thinking);
  result.prefix = beginning(std::string(system)) + opening_of(m_format, ChatRole::user);
  return result;
}

// What stands before the first message that is not the system's.
std::string ChatTemplate::beginning(const std::optional<std::string>& system) const {
  const std::string user = opening_of(m_format, ChatRole::user);
  std::string result = m_no_thinking.prefix.substr(0, m_no_thinking.prefix.size() - user.size());
  if (!system) return result;
  const std::string opening = opening_of(m_format, ChatRole::system);
  const std::string_view end = end_of_message(m_format);
  const std::string text(m_no_thinking.trim_content ? trimmed(*system) : *system);
  const std::size_t own = result.find(opening);
  if (m_format == ChatFormat::llama3 && own != std::string::npos && ends_with(result, end)) {
    // Behind the dates that its own system message begins with.
    return result.insert(result.size() - end.size(), text);
  }
  if (own != std::string::npos) result.resize(own);
  return result + opening + text + std::string(end);
}

std::string ChatTemplate::between_turns() const {
  return std::string(end_of_message(m_format)) + opening_of(m_format, ChatRole::user);
}

std::string ChatTemplate::render(const std::vector<ChatMessage>& messages, bool thinking,
                                 bool add_generation_prompt) const {
  if (messages.empty()) throw Error("a chat template needs at least one message");
  const bool has_system = messages.front().role == ChatRole::system;
  std::string result = has_system ? beginning(messages.front().content) : beginning(std::nullopt);
  // Qwen3 leaves thoughts where the answer to the last question is under way.
  std::size_t last_question = messages.size() - 1;
  for (std::size_t i = messages.size(); i-- > 0;) {
    if (messages[i].role != ChatRole::user || is_tool_response(messages[i].content)) continue;
    last_question = i;
    break;
  }
  for (std::size_t i = has_system ? 1 : 0; i < messages.size(); ++i) {
    const auto& [role, content] = messages[i];
    result += opening_of(m_format, role);
    if (m_format == ChatFormat::qwen3 && role == ChatRole::assistant) {
      const QwenAnswer answer = qwen_answer(content);
      const bool has_block =
          i > last_question && (i + 1 == messages.size() || !answer.thoughts.empty());
      if (has_block) result += fmt::format("<think>\n{}\n</think>\n\n", answer.thoughts);
      result += has_block ? without_newlines(answer.text, true, false) : answer.text;
    } else if (m_no_thinking.trim_content) {
      result += trimmed(content);
    } else {
      result += content;
    }
    result += end_of_message(m_format);
  }
  if (!add_generation_prompt) return result;
  const std::string& suffix = parts(thinking).suffix;
  return result + suffix.substr(end_of_message(m_format).size());
}

ChatTemplate::Exchange ChatTemplate::exchange(std::string_view user,
                                              std::string_view assistant) const {
  std::string between = "<|im_end|>\n<|im_start|>assistant\n";
  std::string end = "<|im_end|>\n";
  if (m_format == ChatFormat::qwen3) {
    between += "<think>\n\n</think>\n\n";
  } else if (m_format == ChatFormat::llama3) {
    between = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n";
    end = "<|eot_id|>";
  }
  Exchange result;
  result.text = m_no_thinking.prefix;
  result.user = result.text.size();
  result.text += user;
  result.text += between;
  result.assistant = result.text.size();
  result.text += assistant;
  result.text += end;
  return result;
}

}  // namespace kvzap
