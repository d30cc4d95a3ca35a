#include "jinja/expression_parser.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "files/quote.hpp"
#include "jinja/evaluator.hpp"

namespace kvzap::jinja {

ExpressionPtr ExpressionParser::make(Kind kind, int line, std::vector<ExpressionPtr> operands) {
  auto node = std::make_unique<Expression>();
  node->kind = kind;
  node->line = line;
  node->operands = std::move(operands);
  return finished(std::move(node));
}

template <class... Operands>
ExpressionPtr ExpressionParser::made(Kind kind, int line, Operands... operands) {
  std::vector<ExpressionPtr> all;
  (all.push_back(std::move(operands)), ...);
  return make(kind, line, std::move(all));
}

/// Computes the depth of a node whose parts are complete.
ExpressionPtr ExpressionParser::finished(ExpressionPtr node) {
  int deepest = 0;
  const auto add = [&](const ExpressionPtr& part) {
    if (part) deepest = std::max(deepest, part->depth);
  };
  for (const auto& part : node->operands) add(part);
  for (const auto& part : node->arguments.positional) add(part);
  for (const auto& part : node->arguments.named) add(part.second);
  add(node->arguments.more_positional);
  add(node->arguments.more_named);
  node->depth = deepest + 1;
  if (node->depth > Nesting::most) m_stream.fail("the template is nested too deep");
  return node;
}

ExpressionPtr ExpressionParser::expression(bool with_condition) {
  const Nesting nesting(m_depth, m_stream);
  return with_condition ? conditional() : either();
}

ExpressionPtr ExpressionParser::conditional() {
  const std::size_t unknown = m_unknown.size();
  ExpressionPtr value = either();
  const bool is_conditional = m_stream.sees_name("if");
  while (m_stream.sees_name("if")) {
    const int line = m_stream.take().line;
    ExpressionPtr condition = either();
    ExpressionPtr otherwise;
    if (m_stream.skip_name("else")) otherwise = expression();
    value =
        made(Kind::conditional, line, std::move(condition), std::move(value), std::move(otherwise));
  }
  if (is_conditional) m_unknown.resize(unknown);
  return value;
}

ExpressionPtr ExpressionParser::either() {
  ExpressionPtr left = both();
  while (m_stream.sees_name("or")) {
    const int line = m_stream.take().line;
    left = made(Kind::either, line, std::move(left), both());
  }
  return left;
}

ExpressionPtr ExpressionParser::both() {
  ExpressionPtr left = negation();
  while (m_stream.sees_name("and")) {
    const int line = m_stream.take().line;
    left = made(Kind::both, line, std::move(left), negation());
  }
  return left;
}

ExpressionPtr ExpressionParser::negation() {
  if (!m_stream.sees_name("not")) return compare();
  const Nesting nesting(m_depth, m_stream);
  const int line = m_stream.take().line;
  return made(Kind::negation, line, negation());
}

ExpressionPtr ExpressionParser::compare() {
  constexpr std::pair<std::string_view, Operator> symbols[] = {
      {"==", Operator::equal},  {"!=", Operator::not_equal},  {"<", Operator::less},
      {">", Operator::greater}, {"<=", Operator::less_equal}, {">=", Operator::greater_equal}};
  const int line = m_stream.line();
  std::vector<ExpressionPtr> operands;
  std::vector<Operator> operators;
  operands.push_back(sum());
  for (;;) {
    const auto found =
        std::find_if(std::begin(symbols), std::end(symbols),
                     [&](const auto& symbol) { return m_stream.sees_symbol(symbol.first); });
    if (found != std::end(symbols)) {
      operators.push_back(found->second);
    } else if (m_stream.sees_name("in")) {
      operators.push_back(Operator::in);
    } else if (m_stream.sees_name("not") && m_stream.sees_next_name("in")) {
      m_stream.take();
      operators.push_back(Operator::not_in);
    } else {
      break;
    }
    m_stream.take();
    operands.push_back(sum());
  }
  if (operators.empty()) return std::move(operands.front());
  ExpressionPtr node = make(Kind::compare, line, std::move(operands));
  node->operators = std::move(operators);
  return node;
}

ExpressionPtr ExpressionParser::binary(
    Rule next, std::initializer_list<std::pair<std::string_view, Operator>> all) {
  ExpressionPtr left = (this->*next)();
  for (;;) {
    const auto found = std::find_if(all.begin(), all.end(), [&](const auto& symbol) {
      return m_stream.sees_symbol(symbol.first);
    });
    if (found == all.end()) return left;
    const int line = m_stream.take().line;
    left = made(Kind::arithmetic, line, std::move(left), (this->*next)());
    left->operators = {found->second};
  }
}

ExpressionPtr ExpressionParser::sum() {
  return binary(&ExpressionParser::concatenation,
                {{"+", Operator::add}, {"-", Operator::subtract}});
}

ExpressionPtr ExpressionParser::concatenation() {
  const int line = m_stream.line();
  std::vector<ExpressionPtr> operands;
  operands.push_back(product());
  while (m_stream.skip_symbol("~")) operands.push_back(product());
  if (operands.size() == 1) return std::move(operands.front());
  return make(Kind::concatenation, line, std::move(operands));
}

ExpressionPtr ExpressionParser::product() {
  return binary(&ExpressionParser::power, {{"*", Operator::multiply},
                                           {"/", Operator::divide},
                                           {"//", Operator::floor_divide},
                                           {"%", Operator::modulo}});
}

ExpressionPtr ExpressionParser::power() {
  return binary(&ExpressionParser::filtered_unary, {{"**", Operator::power}});
}

ExpressionPtr ExpressionParser::unary(bool with_filter) {
  ExpressionPtr node;
  if (m_stream.sees_symbol("-") || m_stream.sees_symbol("+")) {
    const Nesting nesting(m_depth, m_stream);
    const Token sign = m_stream.take();
    node = made(sign.text == "-" ? Kind::minus : Kind::plus, sign.line, unary(false));
  } else {
    node = primary();
  }
  node = postfix(std::move(node));
  return with_filter ? filters(std::move(node)) : std::move(node);
}

ExpressionPtr ExpressionParser::primary() {
  const int line = m_stream.line();
  switch (m_stream.current().kind) {
    case Token::Kind::name:
      return name();
    case Token::Kind::string: {
      std::string text;
      while (m_stream.sees(Token::Kind::string)) text += m_stream.take().text;
      ExpressionPtr node = make(Kind::constant, line);
      node->constant = Value(std::move(text));
      return node;
    }
    case Token::Kind::number: {
      ExpressionPtr node = make(Kind::constant, line);
      node->constant = m_stream.take().number;
      return node;
    }
    default:
      break;
  }
  if (m_stream.skip_symbol("(")) {
    ExpressionPtr node = tuple(true, {}, true);
    m_stream.expect_symbol(")");
    return node;
  }
  if (m_stream.sees_symbol("[")) return list();
  if (m_stream.sees_symbol("{")) return dict();
  m_stream.fail_expected("an expression");
}

ExpressionPtr ExpressionParser::name() {
  const Token token = m_stream.take();
  const std::string& text = token.text;
  const bool is_boolean = text == "true" || text == "True" || text == "false" || text == "False";
  const bool is_none = text == "none" || text == "None";
  ExpressionPtr node = make(is_boolean || is_none ? Kind::constant : Kind::name, token.line);
  if (is_boolean) node->constant = Value((text[0] | 0x20) == 't');
  if (node->kind == Kind::constant) return node;
  node->name = text;
  for (Macro* const macro : m_macros) {
    macro->uses_caller |= text == "caller";
    macro->uses_varargs |= text == "varargs";
    macro->uses_kwargs |= text == "kwargs";
  }
  return node;
}

ExpressionPtr ExpressionParser::tuple(bool with_condition, std::string_view end,
                                      bool may_be_empty) {
  const int line = m_stream.line();
  std::vector<ExpressionPtr> elements;
  bool is_tuple = false;
  for (;;) {
    const bool ends = m_stream.sees(Token::Kind::output_end) ||
                      m_stream.sees(Token::Kind::block_end) || m_stream.sees_symbol(")") ||
                      (!end.empty() && m_stream.sees_name(end));
    if (ends) break;
    elements.push_back(expression(with_condition));
    if (!m_stream.skip_symbol(",")) break;
    is_tuple = true;
  }
  if (!is_tuple && elements.size() == 1) return std::move(elements.front());
  if (!is_tuple && !may_be_empty) m_stream.fail_expected("an expression");
  return make(Kind::tuple, line, std::move(elements));
}

ExpressionPtr ExpressionParser::list() {
  const int line = m_stream.take().line;
  std::vector<ExpressionPtr> elements;
  while (!m_stream.sees_symbol("]")) {
    elements.push_back(expression());
    if (!m_stream.skip_symbol(",")) break;
  }
  m_stream.expect_symbol("]");
  return make(Kind::list, line, std::move(elements));
}

ExpressionPtr ExpressionParser::dict() {
  const int line = m_stream.take().line;
  std::vector<ExpressionPtr> items;
  while (!m_stream.sees_symbol("}")) {
    items.push_back(expression());
    m_stream.expect_symbol(":");
    items.push_back(expression());
    if (!m_stream.skip_symbol(",")) break;
  }
  m_stream.expect_symbol("}");
  return make(Kind::dict, line, std::move(items));
}

ExpressionPtr ExpressionParser::postfix(ExpressionPtr node) {
  for (;;) {
    if (m_stream.sees_symbol(".")) {
      node = attribute(std::move(node));
    } else if (m_stream.sees_symbol("[")) {
      node = subscript(std::move(node));
    } else if (m_stream.sees_symbol("(")) {
      node = call(std::move(node));
    } else {
      return node;
    }
  }
}

ExpressionPtr ExpressionParser::attribute(ExpressionPtr node) {
  const int line = m_stream.take().line;
  if (m_stream.sees(Token::Kind::number) && m_stream.current().number.integer()) {
    ExpressionPtr key = make(Kind::constant, line);
    key->constant = m_stream.take().number;
    return made(Kind::subscript, line, std::move(node), std::move(key));
  }
  ExpressionPtr result = made(Kind::attribute, line, std::move(node));
  result->name = m_stream.expect_any_name();
  return result;
}

ExpressionPtr ExpressionParser::subscript(ExpressionPtr node) {
  const int line = m_stream.take().line;
  std::vector<ExpressionPtr> keys;
  while (!m_stream.sees_symbol("]")) {
    if (!keys.empty()) m_stream.expect_symbol(",");
    ExpressionPtr key;
    if (!m_stream.sees_symbol(":")) key = expression();
    if (m_stream.sees_symbol(":")) {
      if (!keys.empty()) m_stream.fail("a slice cannot be part of a tuple");
      node = slice(std::move(node), std::move(key), line);
      m_stream.expect_symbol("]");
      return node;
    }
    keys.push_back(std::move(key));
  }
  m_stream.expect_symbol("]");
  ExpressionPtr key =
      keys.size() == 1 ? std::move(keys.front()) : make(Kind::tuple, line, std::move(keys));
  return made(Kind::subscript, line, std::move(node), std::move(key));
}

ExpressionPtr ExpressionParser::slice(ExpressionPtr object, ExpressionPtr begin, int line) {
  const auto part = [&]() -> ExpressionPtr {
    if (!m_stream.skip_symbol(":")) return nullptr;
    const bool is_absent = m_stream.sees_symbol(":") || m_stream.sees_symbol("]");
    return is_absent ? nullptr : expression();
  };
  ExpressionPtr end = part();
  ExpressionPtr step = part();
  return made(Kind::slice, line, std::move(object), std::move(begin), std::move(end),
              std::move(step));
}

ExpressionPtr ExpressionParser::call(ExpressionPtr node) {
  const int line = m_stream.line();
  ExpressionPtr result = made(Kind::call, line, std::move(node));
  result->arguments = arguments();
  return finished(std::move(result));
}

ArgumentList ExpressionParser::arguments() {
  ArgumentList result;
  m_stream.expect_symbol("(");
  bool is_first = true;
  const auto require = [&](bool holds) {
    if (!holds) m_stream.fail("arguments of a call in a wrong order");
  };
  while (!m_stream.sees_symbol(")")) {
    if (!is_first) {
      m_stream.expect_symbol(",");
      if (m_stream.sees_symbol(")")) break;
    }
    is_first = false;
    if (m_stream.skip_symbol("*")) {
      require(!result.more_positional && !result.more_named);
      result.more_positional = expression();
    } else if (m_stream.skip_symbol("**")) {
      require(!result.more_named);
      result.more_named = expression();
    } else if (m_stream.sees(Token::Kind::name) && m_stream.sees_next_symbol("=")) {
      require(!result.more_named);
      const std::string name = m_stream.take().text;
      m_stream.take();
      result.named.emplace_back(name, expression());
    } else {
      require(!result.more_positional && !result.more_named && result.named.empty());
      result.positional.push_back(expression());
    }
  }
  m_stream.expect_symbol(")");
  return result;
}

std::string ExpressionParser::dotted_name() {
  std::string name = m_stream.expect_any_name();
  while (m_stream.skip_symbol(".")) name += "." + m_stream.expect_any_name();
  return name;
}

ExpressionPtr ExpressionParser::filter(ExpressionPtr value) {
  const int line = m_stream.line();
  ExpressionPtr node = made(Kind::filter, line, std::move(value));
  node->name = dotted_name();
  if (find_filter(node->name) == nullptr) {
    m_unknown.push_back({line, fmt::format("there is no filter {}", files::in_quotes(node->name))});
  }
  if (m_stream.sees_symbol("(")) node->arguments = arguments();
  return finished(std::move(node));
}

ExpressionPtr ExpressionParser::filters(ExpressionPtr value) {
  for (;;) {
    if (m_stream.skip_symbol("|")) {
      value = filter(std::move(value));
    } else if (value && m_stream.sees_name("is")) {
      value = test(std::move(value));
    } else if (value && m_stream.sees_symbol("(")) {
      value = call(std::move(value));
    } else {
      return value;
    }
  }
}

ExpressionPtr ExpressionParser::test(ExpressionPtr node) {
  const int line = m_stream.take().line;
  const bool is_negated = m_stream.skip_name("not");
  ExpressionPtr result = made(Kind::test, line, std::move(node));
  result->name = dotted_name();
  if (find_test(result->name) == nullptr) {
    m_unknown.push_back({line, fmt::format("there is no test {}", files::in_quotes(result->name))});
  }
  const Token& next = m_stream.current();
  const bool begins_operand = next.kind == Token::Kind::name || next.kind == Token::Kind::string ||
                              next.kind == Token::Kind::number || m_stream.sees_symbol("[") ||
                              m_stream.sees_symbol("{");
  if (m_stream.sees_symbol("(")) {
    result->arguments = arguments();
  } else if (begins_operand && !m_stream.sees_name("else") && !m_stream.sees_name("or") &&
             !m_stream.sees_name("and")) {
    if (m_stream.sees_name("is")) m_stream.fail("tests with 'is' cannot be chained");
    const Nesting nesting(m_depth, m_stream);
    result->arguments.positional.push_back(postfix(primary()));
  }
  result = finished(std::move(result));
  return is_negated ? made(Kind::negation, line, std::move(result)) : std::move(result);
}

}  // namespace kvzap::jinja
