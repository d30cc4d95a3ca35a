// The evaluator's loops, assignments, calls and macros.
#include "jinja/evaluator.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "files/quote.hpp"
#include "jinja/printing.hpp"
#include "jinja/string_methods.hpp"

namespace kvzap::jinja {

// ---- Loops --------------------------------------------------------------------------------------

const std::optional<Value>& Loop::peek() {
  while (!after && cursor < source.size()) {
    Value value = source[cursor++];
    if (!passes || passes(value)) after = std::move(value);
  }
  return after;
}

bool Loop::advance() {
  if (!peek()) return false;
  previous = std::exchange(current, std::exchange(after, std::nullopt));
  ++index;
  return true;
}

std::int64_t Loop::length() {
  if (passes) {
    std::vector<Value> rest;
    while (peek()) rest.push_back(*std::exchange(after, std::nullopt));
    source = std::move(rest);
    cursor = 0;
    passes = nullptr;
  }
  return index + 1 + (after ? 1 : 0) + static_cast<std::int64_t>(source.size() - cursor);
}

// ---- Scopes -------------------------------------------------------------------------------------

Evaluator::~Evaluator() {
  // Macros and the scopes that they refer to contain one another.
  for (const auto& scope : m_kept) scope->variables.clear();
  m_scope->variables.clear();
}

void Evaluator::keep(const std::shared_ptr<Scope>& scope) {
  m_meter.allocate(sizeof(Scope));
  m_kept.push_back(scope);
}

void Evaluator::enter() {
  constexpr int most = 500;
  if (++m_level > most) throw Failure("the template's macros or expressions are nested too deep");
}

Value Evaluator::variable(const std::string& name) {
  for (const Scope* scope = m_scope.get(); scope != nullptr; scope = scope->parent.get()) {
    const auto found = scope->variables.find(name);
    if (found != scope->variables.end()) return found->second;
  }
  const Builtin* const global = find_global(name);
  return global ? Value(std::make_shared<const Callable>(Callable{global, {}})) : Undefined{name};
}

// ---- Statements ---------------------------------------------------------------------------------

void Evaluator::run_body(const Body& body) {
  enter();
  for (const Statement& statement : body) {
    m_meter.step();
    m_line = statement.line;
    statement.run(*this);
    if (flow != Flow::normal) break;
  }
  --m_level;
}

void Evaluator::write(const Value& value) { append_text(*m_output, value, m_meter); }

void Evaluator::run_loop(const LoopBlock& block, const Value& iterable,
                         const std::shared_ptr<Scope>& scope, int level) {
  m_meter.allocate(sizeof(Loop));
  Loop& loop = m_loops.emplace_back();
  loop.source = elements_of(iterable);
  loop.level = level;
  loop.block = &block;
  if (block.is_recursive) {
    keep(scope);
    loop.scope = scope.get();
  }
  if (block.filter.run) {
    loop.passes = [this, &block, &scope](const Value& value) {
      bool passes = false;
      inside(scope, [&] {
        assign(block.target, value);
        passes = is_true(evaluate(block.filter));
      });
      return passes;
    };
  }
  bool has_completed = false;
  while (loop.advance()) {
    inside(scope, [&] {
      m_scope->variables["loop"] = Value(&loop);
      assign(block.target, *loop.current);
      run_body(block.body);
    });
    const Flow end = std::exchange(flow, Flow::normal);
    if (end == Flow::stop) break;
    // Jinja2 runs `else` unless an iteration reaches the end of the body.
    has_completed |= end == Flow::normal;
  }
  // The object may outlive the loop in a namespace.
  loop.source.clear();
  loop.cursor = 0;
  loop.passes = nullptr;
  if (!has_completed) inside(scope, [&] { run_body(block.otherwise); });
}

Value Evaluator::recurse(const Loop& loop, const Value& iterable) {
  if (loop.scope == nullptr) throw Failure("this loop is not recursive");
  // `keep` owns the scope.
  const std::shared_ptr<Scope> scope(std::shared_ptr<Scope>(), loop.scope);
  return make_text(captured([&] { run_loop(*loop.block, iterable, scope, loop.level + 1); }));
}

std::optional<Value> Evaluator::filtered_block(const Body& body, const Expression& filters) {
  Value text = make_text(captured([&] { inside([&] { run_body(body); }); }));
  if (flow != Flow::normal) return std::nullopt;
  if (!filters.run) return text;
  given = std::move(text);
  return evaluate(filters);
}

void require_public(std::string_view name) {
  if (name.substr(0, 1) == "_") {
    throw Failure("an attribute of a namespace must not begin with an underscore");
  }
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
  require_public(target.attribute);
  m_meter.allocate(target.attribute.size());
  space->attributes[target.attribute] = value;
}

// ---- Expressions --------------------------------------------------------------------------------

Value Evaluator::evaluate(const Expression& expression) {
  enter();
  m_meter.step();
  m_line = expression.line;
  Value value = expression.run(*this);
  --m_level;
  return value;
}

Arguments Evaluator::arguments_of(const ArgumentList& list) {
  Arguments result;
  for (const Expression& value : list.positional) result.positional.push_back(evaluate(value));
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
  for (const auto& [name, value] : list.named) add(name, evaluate(value));
  if (list.more_positional.run) {
    std::vector<Value> more = elements_of(evaluate(list.more_positional));
    std::move(more.begin(), more.end(), std::back_inserter(result.positional));
  }
  if (!list.more_named.run) return result;
  const Value more = evaluate(list.more_named);
  if (more.dict() == nullptr) throw Failure("the value after ** must be a dict");
  for (const auto& [key, value] : more.dict()->items) {
    if (!key.is_string()) throw Failure("the keys of the dict after ** must be strings");
    add(key.text()->bytes, value);
  }
  return result;
}

Value Evaluator::apply(const Builtin* function, std::string_view kind, std::string_view name,
                       const Value& value, Arguments& arguments) {
  m_meter.step();
  if (function == nullptr) {
    throw Failure(fmt::format("there is no {} {}", kind, files::in_quotes(name)));
  }
  Call call(*this, *function, value, arguments);
  return function->function(call);
}

namespace {

Value escape(Evaluator& evaluator, const Value& value) {
  return is_safe(value) ? value : evaluator.make_text(escaped(evaluator.text_of(value)), true);
}

/// Returns a string, or the strings of a list or tuple, as escaped ones.
Value marked(Evaluator& evaluator, const Value& value) {
  if (const Text* const text = value.text()) return evaluator.make_text(text->bytes, true);
  const Sequence* const sequence = value.sequence();
  if (sequence == nullptr) return value;
  std::vector<Value> values;
  for (const Value& element : sequence->values) values.push_back(marked(evaluator, element));
  return evaluator.make_sequence(std::move(values), sequence->shape);
}

/// Calls a method of an escaped string: its arguments become escaped, and so do its results.
Value call_of_safe(Evaluator& evaluator, const Callable& method, Arguments& arguments) {
  const std::string_view name = method.builtin->name;
  auto& given = arguments.positional;
  if (name == "join" && !given.empty()) {
    std::vector<Value> elements = evaluator.elements_of(given[0]);
    for (Value& element : elements) element = escape(evaluator, element);
    given[0] = evaluator.make_sequence(std::move(elements));
  }
  const bool has_text = name == "replace" || name == "ljust" || name == "rjust" || name == "center";
  if (has_text && given.size() > 1 && given[1].is_string()) given[1] = escape(evaluator, given[1]);
  Call call(evaluator, *method.builtin, method.self, arguments);
  return marked(evaluator, method.builtin->function(call));
}

}  // namespace

Value Evaluator::call(const Value& callee, Arguments& arguments) {
  static constexpr Builtin loop = {
      "loop", [](Call& c) { return c.evaluator.recurse(*c.self.loop(), *c[0]); }, 1, {"iterable"}};
  m_meter.step();
  if (callee.loop()) {
    Call call(*this, loop, callee, arguments);
    return loop.function(call);
  }
  require_defined(callee);
  const Callable* const callable = callee.callable();
  if (callable == nullptr) throw Failure(fmt::format("a {} cannot be called", callee.type_name()));
  if (callable->macro) return call_macro(*callable, arguments);
  if (is_safe(callable->self)) return call_of_safe(*this, *callable, arguments);
  Call call(*this, *callable->builtin, callable->self, arguments);
  return callable->builtin->function(call);
}

// ---- Macros -------------------------------------------------------------------------------------

Value Evaluator::make_macro(const Macro& macro) {
  m_meter.allocate(sizeof(Callable));
  keep(m_scope);
  return std::make_shared<const Callable>(Callable{nullptr, {}, &macro, m_scope.get()});
}

Value Evaluator::call_macro(const Callable& callable, Arguments& arguments) {
  const int line = m_line;
  std::string text = captured([&] {
    inside({std::shared_ptr<Scope>(), callable.scope}, [&] {
      bind(*callable.macro, arguments);
      run_body(callable.macro->body);
    });
  });
  m_line = line;
  return make_text(std::move(text));
}

void Evaluator::bind(const Macro& macro, Arguments& arguments) {
  auto& variables = m_scope->variables;
  const auto& parameters = macro.parameters;
  const std::size_t given_count = std::min(parameters.size(), arguments.positional.size());
  const auto positional = arguments.positional.begin();
  for (std::size_t i = 0; i < given_count; ++i) variables[parameters[i].first] = positional[i];
  std::vector<std::pair<Value, Value>> named;
  for (auto& [name, value] : arguments.named) {
    std::size_t index = given_count;
    while (index < parameters.size() && parameters[index].first != name) ++index;
    if (index < parameters.size()) {
      variables[parameters[index].first] = value;
    } else if (macro.uses_caller && name == "caller") {
      variables["caller"] = value;
    } else if (macro.uses_kwargs) {
      put(named, make_text(name), value);
    } else {
      throw Failure(fmt::format("macro {} has no free parameter {}", files::in_quotes(macro.name),
                                files::in_quotes(name)));
    }
  }
  if (arguments.positional.size() > parameters.size() && !macro.uses_varargs) {
    throw Failure(fmt::format("macro {} takes at most {} arguments, found {}",
                              files::in_quotes(macro.name), parameters.size(),
                              arguments.positional.size()));
  }
  if (macro.uses_caller) variables.emplace("caller", Undefined{"caller"});
  if (macro.uses_kwargs) variables.emplace("kwargs", make_dict(std::move(named)));
  if (macro.uses_varargs) {
    variables.emplace("varargs", make_tuple({positional + static_cast<std::ptrdiff_t>(given_count),
                                             arguments.positional.end()}));
  }
  for (std::size_t i = given_count; i < parameters.size(); ++i) {
    const auto& [name, otherwise] = parameters[i];
    if (variables.count(name) == 0) {
      variables[name] = otherwise.run ? evaluate(otherwise) : Undefined{name};
    }
  }
}

}  // namespace kvzap::jinja
