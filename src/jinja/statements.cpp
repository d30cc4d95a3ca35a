// The evaluator's statements.
#include <fmt/format.h>

#include <utility>

#include "files/quote.hpp"
#include "jinja/evaluator.hpp"
#include "jinja/markup.hpp"
#include "jinja/printing.hpp"

namespace kvzap::jinja {

// ---- Loops --------------------------------------------------------------------------------------

std::optional<Value> Loop::fetch() {
  while (cursor < source.size()) {
    const Value value = source[cursor++];
    if (!passes || passes(value)) return value;
  }
  return std::nullopt;
}

bool Loop::advance() {
  std::optional<Value> next = after ? std::exchange(after, std::nullopt) : fetch();
  if (!next) return false;
  previous = std::exchange(current, std::move(next));
  ++index;
  return true;
}

const std::optional<Value>& Loop::peek() {
  if (!after) after = fetch();
  return after;
}

std::int64_t Loop::length() {
  if (passes) {
    std::vector<Value> rest;
    while (auto value = fetch()) rest.push_back(*value);
    source = std::move(rest);
    cursor = 0;
    passes = nullptr;
  }
  return index + 1 + (after ? 1 : 0) + static_cast<std::int64_t>(source.size() - cursor);
}

// ---- Guards -------------------------------------------------------------------------------------

Evaluator::Level::Level(Evaluator& evaluator) : m_level(evaluator.m_level) {
  constexpr int most = 500;
  if (m_level >= most) throw Failure("the template's macros or expressions are nested too deep");
  ++m_level;
}

/// Collects output in a string.
class Evaluator::Capture {
 public:
  Capture(Evaluator& evaluator, std::string& text)
      : m_evaluator(evaluator), m_output(std::exchange(evaluator.m_output, &text)) {}
  ~Capture() { m_evaluator.m_output = m_output; }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

 private:
  Evaluator& m_evaluator;
  std::string* m_output;
};

/// Enters a new scope inside of `parent`.
class Evaluator::Inside {
 public:
  Inside(Evaluator& evaluator, std::shared_ptr<Scope> parent) : m_evaluator(evaluator) {
    auto scope = std::make_shared<Scope>();
    scope->parent = std::move(parent);
    m_outer = std::exchange(evaluator.m_scope, std::move(scope));
  }
  ~Inside() { m_evaluator.m_scope = std::move(m_outer); }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  Evaluator& m_evaluator;
  std::shared_ptr<Scope> m_outer;
};

Evaluator::~Evaluator() {
  // Macros and the scopes that they refer to contain one another.
  for (const auto& scope : m_kept) scope->variables.clear();
  m_scope->variables.clear();
}

void Evaluator::keep(const std::shared_ptr<Scope>& scope) {
  m_meter.allocate(sizeof(Scope));
  m_kept.push_back(scope);
}

// ---- Statements ---------------------------------------------------------------------------------

std::string Evaluator::run(const Body& body) {
  std::string output;
  const Capture capture(*this, output);
  run_body(body);
  return output;
}

Evaluator::Flow Evaluator::run_body(const Body& body) {
  const Level level(*this);
  for (const Statement& statement : body) {
    const Flow flow = run_statement(statement);
    if (flow != Flow::normal) return flow;
  }
  return Flow::normal;
}

void Evaluator::write(const Value& value) { append_text(*m_output, value, m_meter); }

Evaluator::Flow Evaluator::run_statement(const Statement& statement) {
  m_meter.step();
  m_line = statement.line;
  switch (statement.kind) {
    case Statement::Kind::text:
      m_meter.allocate(statement.text.size());
      *m_output += statement.text;
      return Flow::normal;
    case Statement::Kind::output:
      for (const auto& value : statement.values) write(evaluate(*value));
      return Flow::normal;
    case Statement::Kind::branch:
      return run_branch(statement);
    case Statement::Kind::loop:
      return run_loop(statement, evaluate(*statement.values.front()), m_scope, 0);
    case Statement::Kind::assignment:
      assign(statement.targets.front(), evaluate(*statement.values.front()));
      return Flow::normal;
    case Statement::Kind::block_assignment:
      return run_block_assignment(statement);
    case Statement::Kind::with:
      return run_with(statement);
    case Statement::Kind::macro:
      m_scope->variables[statement.macro->name] = make_macro(*statement.macro);
      return Flow::normal;
    case Statement::Kind::call_block:
      run_call_block(statement);
      return Flow::normal;
    case Statement::Kind::filter_block:
      return run_filter_block(statement);
    case Statement::Kind::scope: {
      const Inside inside(*this, m_scope);
      return run_body(statement.bodies.front());
    }
    case Statement::Kind::next:
      return Flow::next;
    case Statement::Kind::stop:
      return Flow::stop;
  }
  return Flow::normal;
}

Evaluator::Flow Evaluator::run_branch(const Statement& statement) {
  for (std::size_t i = 0; i < statement.values.size(); ++i) {
    if (is_true(evaluate(*statement.values[i]))) return run_body(statement.bodies[i]);
  }
  return run_body(statement.bodies.back());
}

Evaluator::Flow Evaluator::run_loop(const Statement& statement, const Value& iterable,
                                    const std::shared_ptr<Scope>& scope, int level) {
  m_meter.allocate(sizeof(Loop));
  Loop& loop = m_loops.emplace_back();
  loop.source = elements_of(iterable);
  loop.level = level;
  loop.statement = &statement;
  if (statement.is_recursive) {
    keep(scope);
    loop.scope = scope.get();
  }
  const Target& target = statement.targets.front();
  if (const Expression* const filter = statement.values[1].get()) {
    loop.passes = [this, &target, &scope, filter](const Value& value) {
      const Inside inside(*this, scope);
      assign(target, value);
      return is_true(evaluate(*filter));
    };
  }
  bool has_completed = false;
  while (loop.advance()) {
    const Inside inside(*this, scope);
    m_scope->variables["loop"] = Value(&loop);
    assign(target, *loop.current);
    const Flow flow = run_body(statement.bodies.front());
    if (flow == Flow::stop) break;
    // Jinja2 runs `else` unless an iteration reaches the end of the body.
    has_completed |= flow == Flow::normal;
  }
  // The object may outlive the loop in a namespace.
  loop.source.clear();
  loop.cursor = 0;
  loop.passes = nullptr;
  if (has_completed) return Flow::normal;
  const Inside inside(*this, scope);
  return run_body(statement.bodies.back());
}

Value Evaluator::recurse(const Loop& loop, const Value& iterable) {
  const Level level(*this);
  if (loop.scope == nullptr) throw Failure("this loop is not recursive");
  std::string text;
  {
    const Capture capture(*this, text);
    // `keep` owns the scope.
    const std::shared_ptr<Scope> scope(std::shared_ptr<Scope>(), loop.scope);
    run_loop(*loop.statement, iterable, scope, loop.level + 1);
  }
  return make_text(std::move(text));
}

Evaluator::Flow Evaluator::run_with(const Statement& statement) {
  std::vector<Value> values;
  for (const auto& value : statement.values) values.push_back(evaluate(*value));
  const Inside inside(*this, m_scope);
  for (std::size_t i = 0; i < values.size(); ++i) assign(statement.targets[i], values[i]);
  return run_body(statement.bodies.front());
}

Evaluator::Flow Evaluator::run_block_assignment(const Statement& statement) {
  std::string text;
  Flow flow = Flow::normal;
  {
    const Capture capture(*this, text);
    const Inside inside(*this, m_scope);
    flow = run_body(statement.bodies.front());
  }
  if (flow != Flow::normal) return flow;
  Value value = make_text(std::move(text));
  if (statement.values.front()) value = evaluate_filter(*statement.values.front(), &value);
  assign(statement.targets.front(), value);
  return Flow::normal;
}

Evaluator::Flow Evaluator::run_filter_block(const Statement& statement) {
  std::string text;
  {
    const Capture capture(*this, text);
    const Inside inside(*this, m_scope);
    const Flow flow = run_body(statement.bodies.front());
    if (flow != Flow::normal) return flow;
  }
  const Value value = make_text(std::move(text));
  const Value result = evaluate_filter(*statement.values.front(), &value);
  if (!result.is_string()) throw Failure("a filter block needs a filter that returns a string");
  write(result);
  return Flow::normal;
}

void Evaluator::run_call_block(const Statement& statement) {
  const Value caller = make_macro(*statement.macro);
  write(evaluate_call(*statement.values.front(), &caller));
}

void Evaluator::assign(const Target& target, const Value& value) {
  m_meter.step();
  if (target.is_tuple) {
    const std::vector<Value> values = elements_of(value);
    if (values.size() != target.elements.size()) {
      throw Failure(fmt::format("cannot unpack {} values into {} variables", values.size(),
                                target.elements.size()));
    }
    for (std::size_t i = 0; i < values.size(); ++i) assign(target.elements[i], values[i]);
    return;
  }
  if (target.attribute.empty()) {
    const auto [variable, is_new] = m_scope->variables.insert_or_assign(target.name, value);
    static_cast<void>(variable);
    if (is_new) m_meter.allocate(sizeof(Value) + 64);
    return;
  }
  const Scope* scope = m_scope.get();
  while (scope != nullptr && scope->variables.count(target.name) == 0) scope = scope->parent.get();
  Namespace* const space =
      scope == nullptr ? nullptr : scope->variables.find(target.name)->second.space();
  if (space == nullptr) {
    throw Failure(fmt::format("{} is not a namespace", files::in_quotes(target.name)));
  }
  if (target.attribute.front() == '_') {
    throw Failure("an attribute of a namespace must not begin with an underscore");
  }
  m_meter.allocate(target.attribute.size());
  space->attributes[target.attribute] = value;
}

// ---- Macros -------------------------------------------------------------------------------------

Value Evaluator::make_macro(const Macro& macro) {
  m_meter.allocate(sizeof(Callable));
  keep(m_scope);
  auto callable = std::make_shared<Callable>();
  callable->name = macro.name;
  callable->macro = &macro;
  callable->scope = m_scope.get();
  return Value(std::shared_ptr<const Callable>(std::move(callable)));
}

Value Evaluator::call_macro(const Callable& callable, Arguments& arguments) {
  std::string text;
  const int line = m_line;
  {
    const Inside inside(*this, std::shared_ptr<Scope>(std::shared_ptr<Scope>(), callable.scope));
    const Capture capture(*this, text);
    bind(*callable.macro, arguments);
    run_body(callable.macro->body);
  }
  m_line = line;
  return make_text(std::move(text));
}

void Evaluator::bind(const Macro& macro, Arguments& arguments) {
  auto& variables = m_scope->variables;
  const std::size_t count = macro.parameters.size();
  std::vector<std::pair<Value, Value>> named;
  std::optional<Value> caller;
  for (auto& [name, value] : arguments.named) {
    std::size_t index = 0;
    while (index < count && macro.parameters[index].name != name) ++index;
    const bool is_given = index < arguments.positional.size();
    if (index < count && !is_given) {
      variables[macro.parameters[index].name] = value;
    } else if (macro.uses_caller && name == "caller") {
      caller = value;
    } else if (macro.uses_kwargs) {
      put(named, make_text(name), value);
    } else {
      throw Failure(fmt::format("macro {} has no free parameter {}", files::in_quotes(macro.name),
                                files::in_quotes(name)));
    }
  }
  if (arguments.positional.size() > count && !macro.uses_varargs) {
    throw Failure(fmt::format("macro {} takes at most {} arguments, found {}",
                              files::in_quotes(macro.name), count, arguments.positional.size()));
  }
  if (macro.uses_caller) {
    variables.emplace("caller", caller ? *caller : Value(Undefined{"caller"}));
  }
  if (macro.uses_kwargs) variables["kwargs"] = make_dict(std::move(named));
  if (macro.uses_varargs) {
    const auto begin = arguments.positional.begin() +
                       static_cast<std::ptrdiff_t>(std::min(count, arguments.positional.size()));
    variables["varargs"] =
        make_sequence({begin, arguments.positional.end()}, Sequence::Shape::tuple);
  }
  for (std::size_t i = 0; i < count; ++i) {
    const Parameter& parameter = macro.parameters[i];
    if (i < arguments.positional.size()) {
      variables[parameter.name] = arguments.positional[i];
    } else if (variables.count(parameter.name) == 0) {
      variables[parameter.name] =
          parameter.otherwise ? evaluate(*parameter.otherwise) : Value(Undefined{parameter.name});
    }
  }
}

Value Evaluator::call(const Value& callee, Arguments& arguments) {
  m_meter.step();
  const Level level(*this);
  if (const Callable* const callable = callee.callable()) {
    if (callable->macro) return call_macro(*callable, arguments);
    return is_safe(callable->self) ? call_of_safe(*this, *callable, arguments)
                                   : callable->function(*this, callable->self, arguments);
  }
  if (const Loop* const loop = callee.loop()) {
    const Parameters given("loop", arguments, {"iterable"}, 1);
    return recurse(*loop, *given[0]);
  }
  if (const Undefined* const undefined = callee.undefined()) {
    throw Failure(fmt::format("{} is undefined", files::in_quotes(undefined->name)));
  }
  throw Failure(fmt::format("a {} cannot be called", callee.type_name()));
}

}  // namespace kvzap::jinja
