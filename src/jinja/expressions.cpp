// The evaluator's expressions.
#include <fmt/format.h>

#include <utility>

#include "files/quote.hpp"
#include "jinja/evaluator.hpp"
#include "jinja/operators.hpp"
#include "jinja/printing.hpp"

namespace kvzap::jinja {

Value Evaluator::evaluate(const Expression& node) {
  const Level level(*this);
  m_meter.step();
  m_line = node.line;
  using Kind = Expression::Kind;
  const auto operand = [&](std::size_t index) { return evaluate(*node.operands[index]); };
  switch (node.kind) {
    case Kind::constant:
      return node.constant;
    case Kind::name:
      return evaluate_name(node);
    case Kind::list:
      return evaluate_list(node, Sequence::Shape::list);
    case Kind::tuple:
      return evaluate_list(node, Sequence::Shape::tuple);
    case Kind::dict:
      return evaluate_dict(node);
    case Kind::conditional:
      return evaluate_conditional(node);
    case Kind::either:
    case Kind::both:
      return evaluate_logic(node);
    case Kind::negation:
      return !is_true(operand(0));
    case Kind::compare:
      return evaluate_compare(node);
    case Kind::arithmetic: {
      const Value left = operand(0);
      return arithmetic(*this, node.operators.front(), left, operand(1));
    }
    case Kind::minus:
      return negated(operand(0));
    case Kind::plus: {
      const Value value = operand(0);
      return value.floating() ? value : negated(negated(value));
    }
    case Kind::concatenation:
      return evaluate_concatenation(node);
    case Kind::attribute:
      return attribute(operand(0), node.name);
    case Kind::subscript: {
      const Value object = operand(0);
      return item(object, operand(1));
    }
    case Kind::slice:
      return evaluate_slice(node);
    case Kind::call:
      return evaluate_call(node);
    case Kind::filter:
      return evaluate_filter(node);
    case Kind::test:
      return evaluate_test(node);
  }
  return {};
}

Value Evaluator::evaluate_name(const Expression& node) {
  for (const Scope* scope = m_scope.get(); scope != nullptr; scope = scope->parent.get()) {
    const auto found = scope->variables.find(node.name);
    if (found != scope->variables.end()) return found->second;
  }
  if (const Function function = find_global(node.name)) {
    return make_method(node.name, function, Value());
  }
  return Undefined{node.name};
}

Value Evaluator::evaluate_list(const Expression& node, Sequence::Shape shape) {
  std::vector<Value> values;
  for (const auto& operand : node.operands) values.push_back(evaluate(*operand));
  return make_sequence(std::move(values), shape);
}

Value Evaluator::evaluate_dict(const Expression& node) {
  std::vector<std::pair<Value, Value>> items;
  for (std::size_t i = 0; i + 1 < node.operands.size(); i += 2) {
    Value key = evaluate(*node.operands[i]);
    put(items, std::move(key), evaluate(*node.operands[i + 1]));
  }
  return make_dict(std::move(items));
}

Value Evaluator::evaluate_conditional(const Expression& node) {
  if (is_true(evaluate(*node.operands[0]))) return evaluate(*node.operands[1]);
  return node.operands[2] ? evaluate(*node.operands[2]) : Value(Undefined{});
}

Value Evaluator::evaluate_logic(const Expression& node) {
  Value left = evaluate(*node.operands[0]);
  const bool decides = is_true(left) == (node.kind == Expression::Kind::either);
  return decides ? left : evaluate(*node.operands[1]);
}

Value Evaluator::evaluate_compare(const Expression& node) {
  Value left = evaluate(*node.operands.front());
  for (std::size_t i = 0; i < node.operators.size(); ++i) {
    Value right = evaluate(*node.operands[i + 1]);
    if (!holds(*this, node.operators[i], left, right)) return false;
    left = std::move(right);
  }
  return true;
}

Value Evaluator::evaluate_concatenation(const Expression& node) {
  std::string text;
  for (const auto& operand : node.operands) append_text(text, evaluate(*operand), m_meter);
  return make_text(std::move(text));
}

Value Evaluator::evaluate_slice(const Expression& node) {
  const auto part = [&](std::size_t index) {
    return node.operands[index] ? evaluate(*node.operands[index]) : Value();
  };
  const Value object = part(0), begin = part(1), end = part(2);
  return sliced(*this, object, begin, end, part(3));
}

Arguments Evaluator::arguments_of(const ArgumentList& list) {
  Arguments result;
  for (const auto& value : list.positional) result.positional.push_back(evaluate(*value));
  const auto add = [&](const std::string& name, Value value) {
    for (const auto& other : result.named) {
      if (other.first == name) {
        throw Failure(fmt::format("argument {} is given twice", files::in_quotes(name)));
      }
    }
    m_meter.allocate(name.size() + sizeof(Value));
    m_meter.step(static_cast<std::int64_t>(result.named.size() / 16));
    result.named.emplace_back(name, std::move(value));
  };
  for (const auto& [name, value] : list.named) add(name, evaluate(*value));
  if (list.more_positional) {
    for (Value& value : elements_of(evaluate(*list.more_positional))) {
      result.positional.push_back(std::move(value));
    }
  }
  if (!list.more_named) return result;
  const Value more = evaluate(*list.more_named);
  if (more.dict() == nullptr) throw Failure("the value after ** must be a dict");
  for (const auto& [key, value] : more.dict()->items) {
    if (!key.is_string()) throw Failure("the keys of the dict after ** must be strings");
    add(key.text()->bytes, value);
  }
  return result;
}

Value Evaluator::evaluate_call(const Expression& node, const Value* caller) {
  const Value callee = evaluate(*node.operands.front());
  Arguments arguments = arguments_of(node.arguments);
  if (caller) arguments.named.emplace_back("caller", *caller);
  m_line = node.line;
  return call(callee, arguments);
}

Value Evaluator::evaluate_filter(const Expression& node, const Value* value) {
  // A filter block or block assignment gives the innermost value of the chain.
  const Level level(*this);
  Value input;
  const Expression* const operand = node.operands.front().get();
  if (operand == nullptr) {
    input = *value;
  } else if (value != nullptr) {
    input = evaluate_filter(*operand, value);
  } else {
    input = evaluate(*operand);
  }
  Arguments arguments = arguments_of(node.arguments);
  m_line = node.line;
  return filtered(node.name, input, arguments);
}

Value Evaluator::evaluate_test(const Expression& node) {
  const Value value = evaluate(*node.operands.front());
  Arguments arguments = arguments_of(node.arguments);
  m_line = node.line;
  return tested(node.name, value, arguments);
}

Value Evaluator::filtered(std::string_view filter, const Value& value, Arguments& arguments) {
  m_meter.step();
  const Function function = find_filter(filter);
  if (function == nullptr) {
    throw Failure(fmt::format("there is no filter {}", files::in_quotes(filter)));
  }
  return function(*this, value, arguments);
}

bool Evaluator::tested(std::string_view test, const Value& value, Arguments& arguments) {
  m_meter.step();
  const Test function = find_test(test);
  if (function == nullptr)
    throw Failure(fmt::format("there is no test {}", files::in_quotes(test)));
  return function(*this, value, arguments);
}

}  // namespace kvzap::jinja
