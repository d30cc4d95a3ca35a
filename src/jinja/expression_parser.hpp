// Parses expressions with Jinja's precedence.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "jinja/evaluator.hpp"
#include "jinja/lexer.hpp"

namespace kvzap::jinja {

/// Bounds nesting, so neither the parser nor the evaluator exhausts the stack.
inline constexpr int most_nesting = 200;

inline int depth_of(const Expression& expression) { return expression.depth; }
inline int depth_of(const std::vector<Expression>& expressions) {
  int depth = 0;
  for (const Expression& expression : expressions) depth = std::max(depth, expression.depth);
  return depth;
}
inline int depth_of(const ArgumentList& list) {
  int depth =
      std::max({depth_of(list.positional), list.more_positional.depth, list.more_named.depth});
  for (const auto& argument : list.named) depth = std::max(depth, argument.second.depth);
  return depth;
}

/// Reads expressions by recursive descent.
class ExpressionParser : public TokenStream {
 public:
  using TokenStream::TokenStream;

  template <class Read>
  auto nested(const Read& read) {
    if (++m_depth > most_nesting) fail("the template is nested too deep");
    auto result = read();
    --m_depth;
    return result;
  }

  /// Reads a part whose filters and tests must exist.
  template <class Read>
  auto known(const Read& read) {
    const std::size_t before = m_unknown.size();
    auto result = read();
    if (m_unknown.size() > before) throw m_unknown[before];
    return result;
  }

  /// Without `with_condition`, an `if` after the expression belongs to the statement.
  Expression expression(bool with_condition = true) {
    return nested([&] {
      const std::size_t unknown = unknown_count();
      Expression value = binary(0);
      while (with_condition && sees("if")) {
        const int line = take().line;
        Expression condition = binary(0), otherwise;
        if (skip("else")) otherwise = expression();
        const auto run = [](auto& e, auto& when, auto& then, auto& other) -> Value {
          if (is_true(e.evaluate(when))) return e.evaluate(then);
          return other.run ? e.evaluate(other) : Undefined{};
        };
        value = made(line, run, std::move(condition), std::move(value), std::move(otherwise));
        excuse_unknown(unknown);
      }
      return value;
    });
  }

  /// An expression, or several separated by commas: a tuple. `end`: a name that ends it.
  Expression tuple(bool with_condition = true, std::string_view end = {},
                   bool may_be_empty = false) {
    const int line = this->line();
    std::vector<Expression> values;
    bool is_tuple = false;
    while (!sees_any({"}}", "%}", ")"}) && (end.empty() || !sees(end))) {
      values.push_back(expression(with_condition));
      if (!skip(",")) break;
      is_tuple = true;
    }
    if (!is_tuple && values.size() == 1) return std::move(values.front());
    if (!is_tuple && !may_be_empty) fail_expected("an expression");
    return sequence(line, std::move(values), Sequence::Shape::tuple);
  }

  /// Filters of a block, applied to what the evaluator is given: "name(arguments)|name…".
  Expression block_filters() {
    Expression value = made(line(), [](auto& e) { return *std::exchange(e.given, std::nullopt); });
    do {
      value = filter(std::move(value));
    } while (skip("|"));
    return value;
  }

  /// Drops the filters and tests that do not exist after the first ones, because an `if` decides
  /// about them.
  void excuse_unknown(std::size_t count) { m_unknown.resize(count, {0, ""}); }
  std::size_t unknown_count() const { return m_unknown.size(); }

  /// The macros around the place. Names of variables mark them.
  std::vector<Macro*> macros;

 private:
  /// Returns an expression that calls `run` with the evaluator and the operands.
  template <class Run, class... Operands>
  Expression made(int line, Run run, Operands... operands) const {
    const int depth = std::max({0, depth_of(operands)...});
    if (depth >= most_nesting) fail("the template is nested too deep");
    return {[run = std::move(run), all = std::make_tuple(std::move(operands)...)](Evaluator& e) {
              return std::apply([&](const auto&... each) -> Value { return run(e, each...); }, all);
            },
            line, depth + 1};
  }

  void note(const Builtin* function, int line, std::string_view kind, const std::string& name) {
    if (function) return;
    m_unknown.emplace_back(line, fmt::format("there is no {} {}", kind, files::in_quotes(name)));
  }

  // ---- Operators --------------------------------------------------------------------------------

  /// Reads operators of a level of precedence, from 0 for `or`, and all that bind closer.
  Expression binary(int level) {
    static constexpr struct {
      std::string_view symbol;
      int level;
      Operator operation;
    } all[] = {{"or", 0, Operator::either},     {"and", 1, Operator::both},
               {"+", 4, Operator::add},         {"-", 4, Operator::subtract},
               {"~", 5, Operator::concatenate}, {"*", 6, Operator::multiply},
               {"/", 6, Operator::divide},      {"//", 6, Operator::floor_divide},
               {"%", 6, Operator::modulo},      {"**", 7, Operator::power}};
    if (level == 2) return negation();
    if (level == 3) return comparison();
    if (level == 8) return unary(true);
    Expression left = binary(level + 1);
    for (;;) {
      const auto found = std::find_if(std::begin(all), std::end(all), [&](const auto& each) {
        return each.level == level && sees(each.symbol);
      });
      if (found == std::end(all)) return left;
      const int line = take().line;
      const auto run = [operation = found->operation](auto& e, auto& a, auto& b) -> Value {
        Value first = e.evaluate(a);
        if (operation > Operator::both) return arithmetic(e, operation, first, e.evaluate(b));
        const bool decides = is_true(first) == (operation == Operator::either);
        return decides ? first : e.evaluate(b);
      };
      left = made(line, run, std::move(left), binary(level + 1));
    }
  }

  Expression negation() {
    if (!sees("not")) return binary(3);
    return nested([&] {
      const int line = take().line;
      return negated_truth(line, negation());
    });
  }
  Expression negated_truth(int line, Expression value) const {
    const auto run = [](auto& e, auto& operand) { return !is_true(e.evaluate(operand)); };
    return made(line, run, std::move(value));
  }

  Expression comparison() {
    static constexpr std::pair<std::string_view, Operator> symbols[] = {
        {"==", Operator::equal},  {"!=", Operator::not_equal},  {"<", Operator::less},
        {">", Operator::greater}, {"<=", Operator::less_equal}, {">=", Operator::greater_equal},
        {"in", Operator::in}};
    const int line = this->line();
    std::vector<Expression> operands;
    std::vector<Operator> operators;
    operands.push_back(binary(4));
    for (;;) {
      const bool negates = sees("not") && next().is("in");
      if (negates) take();
      const auto found = std::find_if(std::begin(symbols), std::end(symbols),
                                      [&](const auto& symbol) { return sees(symbol.first); });
      if (found == std::end(symbols)) break;
      take();
      operators.push_back(negates ? Operator::not_in : found->second);
      operands.push_back(binary(4));
    }
    if (operators.empty()) return std::move(operands.front());
    const auto run = [operators](auto& e, auto& all) {
      Value left = e.evaluate(all.front());
      for (std::size_t i = 0; i < operators.size(); ++i) {
        Value right = e.evaluate(all[i + 1]);
        if (!holds(e, operators[i], left, right)) return false;
        left = std::move(right);
      }
      return true;
    };
    return made(line, run, std::move(operands));
  }

  Expression unary(bool with_filter) {
    Expression value;
    if (sees("-") || sees("+")) {
      value = nested([&] {
        const Token sign = take();
        const auto run = [negates = sign.text == "-"](auto& e, auto& operand) {
          const Value number = e.evaluate(operand);
          return negates ? negated(number) : negated(negated(number));
        };
        return made(sign.line, run, unary(false));
      });
    } else {
      value = primary();
    }
    value = postfix(std::move(value));
    return with_filter ? filters(std::move(value)) : value;
  }

  // ---- Values -----------------------------------------------------------------------------------

  Expression constant(int line, Value value) const {
    return made(line, [value = std::move(value)](auto&) { return value; });
  }

  Expression primary() {
    const int line = this->line();
    if (sees(Kind::name)) return name();
    if (sees(Kind::number)) return constant(line, take().number);
    if (sees(Kind::string)) {
      std::string text;
      while (sees(Kind::string)) text += take().text;
      return constant(line, Value(std::move(text)));
    }
    if (skip("(")) {
      Expression value = tuple(true, {}, true);
      expect(")");
      return value;
    }
    if (skip("[")) return list(line);
    if (skip("{")) return dict(line);
    fail_expected("an expression");
  }

  Expression name() {
    const Token token = take();
    const std::string& text = token.text;
    if (text == "true" || text == "True") return constant(token.line, true);
    if (text == "false" || text == "False") return constant(token.line, false);
    if (text == "none" || text == "None") return constant(token.line, {});
    for (Macro* const macro : macros) {
      macro->uses_caller |= text == "caller";
      macro->uses_varargs |= text == "varargs";
      macro->uses_kwargs |= text == "kwargs";
    }
    return made(token.line, [text](auto& e) { return e.variable(text); });
  }

  Expression list(int line) {
    std::vector<Expression> values;
    while (!sees("]")) {
      values.push_back(expression());
      if (!skip(",")) break;
    }
    expect("]");
    return sequence(line, std::move(values), Sequence::Shape::list);
  }
  Expression sequence(int line, std::vector<Expression> values, Sequence::Shape shape) const {
    const auto run = [shape](auto& e, auto& all) {
      std::vector<Value> results;
      for (const Expression& each : all) results.push_back(e.evaluate(each));
      return e.make_sequence(std::move(results), shape);
    };
    return made(line, run, std::move(values));
  }

  Expression dict(int line) {
    std::vector<Expression> keys, values;
    while (!sees("}")) {
      keys.push_back(expression());
      expect(":");
      values.push_back(expression());
      if (!skip(",")) break;
    }
    expect("}");
    const auto run = [](auto& e, auto& all_keys, auto& all_values) {
      std::vector<std::pair<Value, Value>> items;
      for (std::size_t i = 0; i < all_keys.size(); ++i) {
        Value key = e.evaluate(all_keys[i]);
        e.put(items, std::move(key), e.evaluate(all_values[i]));
      }
      return e.make_dict(std::move(items));
    };
    return made(line, run, std::move(keys), std::move(values));
  }

  // ---- Attributes, items and calls --------------------------------------------------------------

  Expression postfix(Expression value) {
    for (;;) {
      const int line = this->line();
      if (skip(".")) {
        value = attribute(line, std::move(value));
      } else if (skip("[")) {
        value = subscript(line, std::move(value));
      } else if (sees("(")) {
        value = call(line, std::move(value));
      } else {
        return value;
      }
    }
  }

  Expression attribute(int line, Expression object) {
    if (sees(Kind::number) && current().number.integer()) {
      return item(line, std::move(object), constant(line, take().number));
    }
    const auto run = [name = expect_name()](auto& e, auto& of) {
      return e.attribute(e.evaluate(of), name);
    };
    return made(line, run, std::move(object));
  }

  Expression item(int line, Expression object, Expression key) const {
    const auto run = [](auto& e, auto& of, auto& with) {
      const Value value = e.evaluate(of);
      return e.item(value, e.evaluate(with));
    };
    return made(line, run, std::move(object), std::move(key));
  }

  Expression subscript(int line, Expression object) {
    std::vector<Expression> keys;
    while (!sees("]")) {
      if (!keys.empty()) expect(",");
      Expression key;
      if (!sees(":")) key = expression();
      if (sees(":")) {
        if (!keys.empty()) fail("a slice cannot be part of a tuple");
        return slice(line, std::move(object), std::move(key));
      }
      keys.push_back(std::move(key));
    }
    expect("]");
    if (keys.size() == 1) return item(line, std::move(object), std::move(keys.front()));
    return item(line, std::move(object), sequence(line, std::move(keys), Sequence::Shape::tuple));
  }

  Expression slice(int line, Expression object, Expression begin) {
    Expression end, step;
    for (Expression* const limit : {&end, &step}) {
      if (skip(":") && !sees(":") && !sees("]")) *limit = expression();
    }
    expect("]");
    const auto run = [](auto& e, auto&... parts) {
      const Value values[] = {parts.run ? e.evaluate(parts) : Value()...};
      return sliced(e, values[0], values[1], values[2], values[3]);
    };
    return made(line, run, std::move(object), std::move(begin), std::move(end), std::move(step));
  }

  Expression call(int line, Expression function) {
    const auto run = [line](Evaluator& e, auto& callee, auto& list) {
      const std::optional<Value> caller = std::exchange(e.given, std::nullopt);
      const Value value = e.evaluate(callee);
      Arguments values = e.arguments_of(list);
      if (caller) values.named.emplace_back("caller", *caller);
      e.at(line);
      return e.call(value, values);
    };
    Expression result = made(line, run, std::move(function), arguments());
    result.is_call = true;
    return result;
  }

  ArgumentList arguments() {
    ArgumentList result;
    const auto require = [&](bool holds) {
      if (!holds) fail("arguments of a call in a wrong order");
    };
    expect("(");
    for (bool is_first = true; !sees(")"); is_first = false) {
      if (!is_first) expect(",");
      if (sees(")") && !is_first) break;
      const bool has_more = result.more_positional.run || result.more_named.run;
      if (skip("*")) {
        require(!has_more);
        result.more_positional = expression();
      } else if (skip("**")) {
        require(!result.more_named.run);
        result.more_named = expression();
      } else if (sees(Kind::name) && next().is("=")) {
        require(!result.more_named.run);
        const std::string name = take().text;
        take();
        result.named.emplace_back(name, expression());
      } else {
        require(!has_more && result.named.empty());
        result.positional.push_back(expression());
      }
    }
    expect(")");
    return result;
  }

  // ---- Filters and tests ------------------------------------------------------------------------

  std::string dotted_name() {
    std::string name = expect_name();
    while (skip(".")) name += "." + expect_name();
    return name;
  }

  /// A call of a filter or test on `value`.
  Expression applied(int line, const Builtin* function, std::string_view kind,
                     const std::string& name, Expression value, ArgumentList list) {
    note(function, line, kind, name);
    const auto run = [=](auto& e, auto& operand, auto& all) {
      const Value input = e.evaluate(operand);
      Arguments values = e.arguments_of(all);
      e.at(line);
      return e.apply(function, kind, name, input, values);
    };
    return made(line, run, std::move(value), std::move(list));
  }

  /// "name(arguments)", applied to `value`.
  Expression filter(Expression value) {
    const int line = this->line();
    const std::string name = dotted_name();
    return applied(line, find_filter(name), "filter", name, std::move(value),
                   sees("(") ? arguments() : ArgumentList());
  }

  Expression filters(Expression value) {
    for (;;) {
      const int line = this->line();
      if (skip("|")) {
        value = filter(std::move(value));
      } else if (skip("is")) {
        value = test(line, std::move(value));
      } else if (sees("(")) {
        value = call(line, std::move(value));
      } else {
        return value;
      }
    }
  }

  Expression test(int line, Expression value) {
    const bool is_negated = skip("not");
    const std::string name = dotted_name();
    const bool begins_operand =
        sees(Kind::name) || sees(Kind::string) || sees(Kind::number) || sees("[") || sees("{");
    ArgumentList list;
    if (sees("(")) {
      list = arguments();
    } else if (begins_operand && !sees_any({"else", "or", "and"})) {
      if (sees("is")) fail("tests with 'is' cannot be chained");
      list.positional.push_back(nested([&] { return postfix(primary()); }));
    }
    value = applied(line, find_test(name), "test", name, std::move(value), std::move(list));
    return is_negated ? negated_truth(line, std::move(value)) : value;
  }

  int m_depth = 0;  // nesting of the template at the place
  // Filters and tests that do not exist. As in Jinja2, they are errors unless an `if` decides
  // whether the template reaches them.
  std::vector<SyntaxFailure> m_unknown;
};

}  // namespace kvzap::jinja
