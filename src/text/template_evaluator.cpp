#include "text/template_evaluator.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "base/quote.hpp"

namespace kvzap::text::jinja {
namespace {

// Without a limit, a few lines that double a variable would take all memory.
constexpr std::size_t max_text_bytes = 4u << 20;
// A second limit: thousands of statements must not copy such texts for minutes.
constexpr std::size_t max_copied_bytes = 64u << 20;

enum class Truth { no, yes, unknown };

Truth truth_of(bool value) { return value ? Truth::yes : Truth::no; }

struct Value {
  enum Kind { unknown, boolean, messages, text } kind = unknown;
  bool truth = false;
  std::vector<Part> parts;

  static Value of(std::string literal) {
    return {text, false, {{Part::literal, std::move(literal)}}};
  }
  // Returns the text if all of it is known.
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

// Returns the approximate memory of a value.
std::size_t bytes_of(const Value& value) {
  std::size_t bytes = 0;
  for (const Part& part : value.parts) bytes += sizeof(Part) + part.text.size();
  return bytes;
}

using Tokens = std::vector<Token>;
using Iterator = Tokens::const_iterator;

// Runs a template on one user message, as far as its text is known. Each condition that decides
// about output must be known, so nothing is guessed.
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

  // Returns nothing if a part is not understood; problem() then names it.
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
    // For a loop: variables before each assignment; the end of the loop restores them.
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

  // A loop over the messages runs once, for the user's message.
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
    // Values that transformers passes to the template are identified by name.
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
                              base::shown(name), max_text_bytes);
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

  // A concatenation of texts, a boolean or the list of messages.
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

  // Returns the next token `keyword` outside parentheses, or end.
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

  // transformers passes the messages, tools (none) and the settings of its call. It also passes
  // strftime_now, which counts as missing here: see ChatTemplate::parts.
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

}  // namespace

std::optional<std::vector<Part>> evaluate(const std::vector<Node>& nodes,
                                          const std::optional<std::string>& bos_token,
                                          bool thinking, std::string& problem) {
  Evaluator evaluator(nodes, bos_token, thinking);
  auto parts = evaluator.run();
  problem = evaluator.problem();
  return parts;
}

}  // namespace kvzap::text::jinja
