#include "jinja/parser.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "files/quote.hpp"
#include "jinja/expression_parser.hpp"
#include "jinja/token_stream.hpp"

namespace kvzap::jinja {
namespace {

using Kind = Statement::Kind;

class Parser {
 public:
  explicit Parser(std::string_view source) : m_stream(tokens_of(source)), m_expressions(m_stream) {}

  Body operator()() {
    Body result = body({});
    require_known(0);
    return result;
  }

 private:
  using Ends = std::initializer_list<std::string_view>;

  /// Refuses filters and tests that do not exist, from the first of them on.
  void require_known(std::size_t first) const {
    const auto& unknown = m_expressions.unknown();
    if (unknown.size() > first) throw SyntaxFailure(unknown[first].line, unknown[first].message);
  }
  /// Reads a part whose filters and tests must exist.
  template <class Read>
  auto known(const Read& read) {
    const std::size_t before = m_expressions.unknown().size();
    auto result = read();
    require_known(before);
    return result;
  }

  static Statement make(Kind kind, int line) { return {kind, line, {}, {}, {}, {}, {}, false}; }

  /// Reads until a tag of `ends`, whose name becomes the current token, or until the end of the
  /// template if there are no ends.
  Body body(Ends ends) {
    const Nesting nesting(m_expressions.depth(), m_stream);
    Body result;
    while (!m_stream.sees(Token::Kind::end)) {
      const int line = m_stream.line();
      if (m_stream.sees(Token::Kind::text)) {
        Statement text = make(Kind::text, line);
        text.text = m_stream.take().text;
        result.push_back(std::move(text));
      } else if (m_stream.sees(Token::Kind::output_begin)) {
        m_stream.take();
        Statement output = make(Kind::output, line);
        output.values.push_back(m_expressions.tuple());
        m_stream.expect(Token::Kind::output_end, "}}");
        result.push_back(std::move(output));
      } else {
        m_stream.expect(Token::Kind::block_begin, "{%");
        const bool ends_here = std::any_of(ends.begin(), ends.end(), [&](std::string_view name) {
          return m_stream.sees_name(name);
        });
        if (ends_here) return result;
        result.push_back(statement());
        m_stream.expect(Token::Kind::block_end, "%}");
      }
    }
    if (ends.size() > 0) {
      m_stream.fail(fmt::format("the template ends before {}", *(ends.end() - 1)));
    }
    return result;
  }

  /// Reads the rest of a tag and the body after it.
  Body block(Ends ends) {
    m_stream.skip_symbol(":");
    m_stream.expect(Token::Kind::block_end, "%}");
    return body(ends);
  }
  Body closed_block(std::string_view end) {
    Body result = known([&] { return block({end}); });
    m_stream.take();
    return result;
  }

  Statement statement() {
    using Rule = Statement (Parser::*)(int);
    static constexpr std::pair<std::string_view, Rule> rules[] = {
        {"if", &Parser::branch},
        {"for", &Parser::loop},
        {"set", &Parser::assignment},
        {"macro", &Parser::macro},
        {"call", &Parser::call_block},
        {"filter", &Parser::filter_block},
        {"with", &Parser::with},
        {"print", &Parser::print},
        {"generation", &Parser::generation},
        {"break", &Parser::stop},
        {"continue", &Parser::next},
    };
    if (!m_stream.sees(Token::Kind::name)) m_stream.fail_expected("the name of a tag");
    const auto found = std::find_if(std::begin(rules), std::end(rules), [&](const auto& rule) {
      return m_stream.sees_name(rule.first);
    });
    if (found == std::end(rules)) {
      m_stream.fail(fmt::format("unknown or misplaced tag {}", m_stream.description()));
    }
    const int line = m_stream.take().line;
    return (this->*found->second)(line);
  }

  Statement branch(int line) {
    Statement result = make(Kind::branch, line);
    const std::size_t unknown = m_expressions.unknown().size();
    for (;;) {
      result.values.push_back(m_expressions.tuple(false));
      result.bodies.push_back(block({"elif", "else", "endif"}));
      const std::string end = m_stream.take().text;
      if (end == "elif") continue;
      result.bodies.push_back(end == "else" ? block({"endif"}) : Body());
      if (end == "else") m_stream.take();
      m_expressions.unknown().resize(unknown);
      return result;
    }
  }

  Statement loop(int line) {
    Statement result = make(Kind::loop, line);
    result.targets.push_back(target("in", false));
    if (has_name(result.targets.front(), "loop")) {
      m_stream.fail("the variable loop cannot be a target of a loop");
    }
    m_stream.expect_name("in");
    result.values.push_back(m_expressions.tuple(false, "recursive"));
    const bool has_filter = m_stream.skip_name("if");
    result.values.push_back(has_filter ? known([&] { return m_expressions.expression(); })
                                       : nullptr);
    result.is_recursive = m_stream.skip_name("recursive");
    ++m_loops;
    result.bodies.push_back(known([&] { return block({"else", "endfor"}); }));
    --m_loops;
    const bool has_else = m_stream.take().text == "else";
    result.bodies.push_back(has_else ? closed_block("endfor") : Body());
    return result;
  }

  static bool has_name(const Target& target, std::string_view name) {
    return target.name == name || std::any_of(target.elements.begin(), target.elements.end(),
                                              [&](const Target& t) { return has_name(t, name); });
  }

  /// Reads a target, or several separated by commas. `end`: a name that ends it.
  Target target(std::string_view end, bool with_namespace) {
    Target all;
    for (;;) {
      const bool ends = m_stream.sees(Token::Kind::block_end) || m_stream.sees_symbol(")") ||
                        (!end.empty() && m_stream.sees_name(end));
      if (ends) break;
      all.elements.push_back(single_target(with_namespace));
      if (!m_stream.skip_symbol(",")) break;
      all.is_tuple = true;
    }
    if (all.is_tuple) return all;
    if (all.elements.empty()) m_stream.fail_expected("a name");
    Target only = std::move(all.elements.front());
    return only;
  }

  Target single_target(bool with_namespace) {
    const Nesting nesting(m_expressions.depth(), m_stream);
    if (m_stream.skip_symbol("(")) {
      Target inner = target({}, false);
      m_stream.expect_symbol(")");
      return inner;
    }
    Target result;
    result.name = assignable_name();
    if (with_namespace && m_stream.skip_symbol(".")) result.attribute = m_stream.expect_any_name();
    return result;
  }

  std::string assignable_name() {
    constexpr std::string_view constants[] = {"true", "True", "false", "False", "none", "None"};
    if (std::find(std::begin(constants), std::end(constants), m_stream.current().text) !=
        std::end(constants)) {
      m_stream.fail("a constant cannot be assigned to");
    }
    return m_stream.expect_any_name();
  }

  Statement assignment(int line) {
    Target left = target({}, true);
    if (m_stream.skip_symbol("=")) {
      Statement result = make(Kind::assignment, line);
      result.targets.push_back(std::move(left));
      result.values.push_back(m_expressions.tuple());
      return result;
    }
    Statement result = make(Kind::block_assignment, line);
    result.targets.push_back(std::move(left));
    result.values.push_back(known([&] { return m_expressions.filters(nullptr); }));
    result.bodies.push_back(closed_block("endset"));
    return result;
  }

  Statement with(int line) {
    Statement result = make(Kind::with, line);
    while (!m_stream.sees(Token::Kind::block_end)) {
      if (!result.targets.empty()) m_stream.expect_symbol(",");
      result.targets.push_back(single_target(false));
      m_stream.expect_symbol("=");
      result.values.push_back(m_expressions.expression());
    }
    result.bodies.push_back(closed_block("endwith"));
    return result;
  }

  void parameters(Macro& macro) {
    std::set<std::string> names;
    m_stream.expect_symbol("(");
    while (!m_stream.sees_symbol(")")) {
      if (!macro.parameters.empty()) m_stream.expect_symbol(",");
      Parameter parameter{assignable_name(), nullptr};
      if (!names.insert(parameter.name).second) m_stream.fail("a parameter occurs twice");
      if (m_stream.skip_symbol("=")) {
        parameter.otherwise = m_expressions.expression();
      } else if (!macro.parameters.empty() && macro.parameters.back().otherwise) {
        m_stream.fail("a parameter without default follows one with a default");
      }
      macro.parameters.push_back(std::move(parameter));
    }
    m_stream.expect_symbol(")");
  }

  /// Reads the body of a macro or call block, which loops around it do not reach.
  void macro_body(Macro& macro, std::string_view end) {
    const int loops = std::exchange(m_loops, 0);
    m_expressions.macros().push_back(&macro);
    macro.body = closed_block(end);
    m_expressions.macros().pop_back();
    m_loops = loops;
  }

  Statement macro(int line) {
    Statement result = make(Kind::macro, line);
    result.macro = std::make_unique<Macro>();
    result.macro->name = assignable_name();
    parameters(*result.macro);
    macro_body(*result.macro, "endmacro");
    return result;
  }

  Statement call_block(int line) {
    Statement result = make(Kind::call_block, line);
    result.macro = std::make_unique<Macro>();
    result.macro->name = "caller";
    if (m_stream.sees_symbol("(")) parameters(*result.macro);
    result.values.push_back(m_expressions.expression());
    if (result.values.front()->kind != Expression::Kind::call) m_stream.fail("expected a call");
    macro_body(*result.macro, "endcall");
    return result;
  }

  Statement filter_block(int line) {
    Statement result = make(Kind::filter_block, line);
    result.values.push_back(
        known([&] { return m_expressions.filters(m_expressions.filter(nullptr)); }));
    result.bodies.push_back(closed_block("endfilter"));
    return result;
  }

  Statement print(int line) {
    Statement result = make(Kind::output, line);
    while (!m_stream.sees(Token::Kind::block_end)) {
      if (!result.values.empty()) m_stream.expect_symbol(",");
      result.values.push_back(m_expressions.expression());
    }
    return result;
  }

  Statement generation(int line) {
    Statement result = make(Kind::scope, line);
    const int loops = std::exchange(m_loops, 0);
    result.bodies.push_back(closed_block("endgeneration"));
    m_loops = loops;
    return result;
  }

  Statement stop(int line) { return jump(Kind::stop, line); }
  Statement next(int line) { return jump(Kind::next, line); }
  Statement jump(Kind kind, int line) {
    if (m_loops == 0) m_stream.fail("break or continue outside of a loop");
    return make(kind, line);
  }

  TokenStream m_stream;
  ExpressionParser m_expressions;
  int m_loops = 0;  // around the place
};

}  // namespace

Body parse(std::string_view source) { return Parser(source)(); }

}  // namespace kvzap::jinja
