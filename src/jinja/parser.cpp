// Parses statements.
#include <fmt/format.h>

#include <algorithm>

#include "jinja/expression_parser.hpp"

namespace kvzap::jinja {
namespace {

/// Reads statements.
class Parser : private ExpressionParser {
 public:
  using ExpressionParser::ExpressionParser;

  Body operator()() {
    return known([&] { return body({}); });
  }

 private:
  /// Reads until a tag of `ends`, whose name becomes the current token, or until the end of the
  /// template if there are no ends.
  Body body(Words ends) {
    return nested([&] {
      Body result;
      while (!sees(Kind::end)) {
        const int line = this->line();
        if (sees(Kind::text)) {
          result.push_back({line, [text = Value(take().text)](Evaluator& e) { e.write(text); }});
        } else if (skip("{{")) {
          result.push_back({line, [value = tuple()](Evaluator& e) { e.write(e.evaluate(value)); }});
          expect("}}");
        } else {
          expect("{%");
          if (sees_any(ends)) return result;
          result.push_back(statement());
          expect("%}");
        }
      }
      if (ends.size() > 0) fail(fmt::format("the template ends before {}", *(ends.end() - 1)));
      return result;
    });
  }

  /// Reads the rest of a tag and the body after it.
  Body block(Words ends) {
    skip(":");
    expect("%}");
    return body(ends);
  }
  Body closed_block(std::string_view end) {
    Body result = known([&] { return block({end}); });
    take();
    return result;
  }

  using Run = std::function<void(Evaluator&)>;

  Statement statement() {
    using Rule = Run (Parser::*)();
    static constexpr std::pair<std::string_view, Rule> rules[] = {
        {"if", &Parser::branch},       {"for", &Parser::loop},
        {"set", &Parser::assignment},  {"macro", &Parser::macro},
        {"call", &Parser::call_block}, {"filter", &Parser::filter_block},
        {"with", &Parser::with},       {"print", &Parser::print},
        {"break", &Parser::stop},      {"generation", &Parser::generation},
        {"continue", &Parser::go_on}};
    if (!sees(Kind::name)) fail_expected("the name of a tag");
    const auto found = std::find_if(std::begin(rules), std::end(rules),
                                    [&](const auto& rule) { return sees(rule.first); });
    if (found == std::end(rules)) fail("unknown or misplaced tag " + description());
    const int line = take().line;
    return {line, (this->*found->second)()};
  }

  Run branch() {
    const std::size_t unknown = unknown_count();
    std::vector<Expression> conditions;
    std::vector<Body> bodies;  // one for each condition, and one for else
    std::string end = "elif";
    while (end == "elif") {
      conditions.push_back(tuple(false));
      bodies.push_back(block({"elif", "else", "endif"}));
      end = take().text;
    }
    bodies.push_back(end == "else" ? block({"endif"}) : Body());
    if (end == "else") take();
    excuse_unknown(unknown);
    return [conditions = std::move(conditions), bodies = std::move(bodies)](Evaluator& e) {
      std::size_t i = 0;
      while (i < conditions.size() && !is_true(e.evaluate(conditions[i]))) ++i;
      e.run_body(bodies[i]);
    };
  }

  Run loop() {
    const auto block_of = std::make_shared<LoopBlock>();
    block_of->target = target("in", false);
    if (has_name(block_of->target, "loop")) {
      fail("the variable loop cannot be a target of a loop");
    }
    expect("in");
    block_of->iterable = tuple(false, "recursive");
    if (skip("if")) block_of->filter = known([&] { return expression(); });
    block_of->is_recursive = skip("recursive");
    ++m_loops;
    block_of->body = known([&] { return block({"else", "endfor"}); });
    --m_loops;
    if (take().text == "else") block_of->otherwise = closed_block("endfor");
    return [block_of](Evaluator& e) { e.run_loop(*block_of); };
  }

  static bool has_name(const Target& target, std::string_view name) {
    return target.name == name || std::any_of(target.elements.begin(), target.elements.end(),
                                              [&](const Target& t) { return has_name(t, name); });
  }

  /// Reads a target, or several separated by commas. `end`: a name that ends it.
  Target target(std::string_view end, bool with_namespace) {
    Target all;
    while (!sees_any({"%}", ")"}) && (end.empty() || !sees(end))) {
      all.elements.push_back(single_target(with_namespace));
      if (!skip(",")) break;
      all.is_tuple = true;
    }
    if (all.is_tuple) return all;
    if (all.elements.empty()) fail_expected("a name");
    return Target(std::move(all.elements.front()));
  }

  Target single_target(bool with_namespace) {
    return nested([&] {
      Target result;
      if (skip("(")) {
        result = target({}, false);
        expect(")");
        return result;
      }
      result.name = assignable_name();
      if (with_namespace && skip(".")) result.attribute = expect_name();
      return result;
    });
  }

  std::string assignable_name() {
    if (sees_any({"true", "True", "false", "False", "none", "None"})) {
      fail("a constant cannot be assigned to");
    }
    return expect_name();
  }

  Run assignment() {
    Target left = target({}, true);
    if (skip("=")) {
      return [left = std::move(left), value = tuple()](Evaluator& e) {
        e.assign(left, e.evaluate(value));
      };
    }
    Expression filters;
    if (skip("|")) filters = known([&] { return block_filters(); });
    return [left = std::move(left), filters = std::move(filters),
            body = closed_block("endset")](Evaluator& e) {
      if (const auto text = e.filtered_block(body, filters)) e.assign(left, *text);
    };
  }

  Run with() {
    std::vector<std::pair<Target, Expression>> variables;
    while (!sees("%}")) {
      if (!variables.empty()) expect(",");
      Target left = single_target(false);
      expect("=");
      variables.emplace_back(std::move(left), expression());
    }
    return [variables = std::move(variables), body = closed_block("endwith")](Evaluator& e) {
      std::vector<Value> values;  // which do not see the variables beside them
      for (const auto& variable : variables) values.push_back(e.evaluate(variable.second));
      e.inside([&] {
        for (std::size_t i = 0; i < values.size(); ++i) e.assign(variables[i].first, values[i]);
        e.run_body(body);
      });
    };
  }

  void parameters(Macro& macro) {
    expect("(");
    while (!sees(")")) {
      if (!macro.parameters.empty()) expect(",");
      std::string name = assignable_name();
      Expression otherwise;
      for (const auto& other : macro.parameters) {
        if (other.first == name) fail("a parameter occurs twice");
      }
      if (skip("=")) {
        otherwise = expression();
      } else if (!macro.parameters.empty() && macro.parameters.back().second.run) {
        fail("a parameter without default follows one with a default");
      }
      macro.parameters.emplace_back(std::move(name), std::move(otherwise));
    }
    expect(")");
  }

  /// Reads a body that loops around it do not reach.
  Body separate_body(std::string_view end) {
    const int loops = std::exchange(m_loops, 0);
    Body result = closed_block(end);
    m_loops = loops;
    return result;
  }
  void macro_body(Macro& macro, std::string_view end) {
    macros.push_back(&macro);
    macro.body = separate_body(end);
    macros.pop_back();
  }

  Run macro() {
    const auto made = std::make_shared<Macro>();
    made->name = assignable_name();
    parameters(*made);
    macro_body(*made, "endmacro");
    return [made](Evaluator& e) { e.set(made->name, e.make_macro(*made)); };
  }

  Run call_block() {
    const auto caller = std::make_shared<Macro>();
    caller->name = "caller";
    if (sees("(")) parameters(*caller);
    Expression call = expression();
    if (!call.is_call) fail("expected a call");
    macro_body(*caller, "endcall");
    return [caller, call = std::move(call)](Evaluator& e) {
      e.given = e.make_macro(*caller);
      e.write(e.evaluate(call));
    };
  }

  Run filter_block() {
    Expression filters = known([&] { return block_filters(); });
    return [filters = std::move(filters), body = closed_block("endfilter")](Evaluator& e) {
      const auto result = e.filtered_block(body, filters);
      if (!result) return;
      if (!result->is_string()) {
        throw Failure("a filter block needs a filter that returns a string");
      }
      e.write(*result);
    };
  }

  Run print() {
    std::vector<Expression> values;
    while (!sees("%}")) {
      if (!values.empty()) expect(",");
      values.push_back(expression());
    }
    return [values = std::move(values)](Evaluator& e) {
      for (const Expression& value : values) e.write(e.evaluate(value));
    };
  }

  Run generation() {
    return [body = separate_body("endgeneration")](Evaluator& e) {
      e.inside([&] { e.run_body(body); });
    };
  }

  Run stop() { return jump(Evaluator::Flow::stop); }
  Run go_on() { return jump(Evaluator::Flow::next); }
  Run jump(Evaluator::Flow flow) const {
    if (m_loops == 0) fail("break or continue outside of a loop");
    return [flow](Evaluator& e) { e.flow = flow; };
  }

  int m_loops = 0;  // around the place
};

}  // namespace

Body parse(std::string_view source) { return Parser(source)(); }

}  // namespace kvzap::jinja
