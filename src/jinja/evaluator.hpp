// Renders a parsed template. One evaluator renders once, so it keeps no order after a Failure.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "jinja/syntax.hpp"
#include "jinja/value.hpp"

namespace kvzap::jinja {

/// Variables of a block, and the scope around it.
struct Scope {
  std::map<std::string_view, Value> variables;
  std::shared_ptr<Scope> parent;
};

/// A for loop while it runs: the object `loop`.
struct Loop {
  std::vector<Value> source;
  std::size_t cursor = 0;                    // of source
  std::function<bool(const Value&)> passes;  // the loop's filter, or null
  std::optional<Value> previous, current, after;
  std::int64_t index = -1;                     // from 0
  int level = 0;                               // of recursion
  std::optional<std::vector<Value>> compared;  // by changed()
  const LoopBlock* block = nullptr;
  Scope* scope = nullptr;  // around a recursive loop

  bool advance();
  const std::optional<Value>& peek();
  std::int64_t length();
};

class Evaluator {
 public:
  explicit Evaluator(Meter& meter) : m_meter(meter), m_scope(std::make_shared<Scope>()) {}
  ~Evaluator();
  Evaluator(const Evaluator&) = delete;
  Evaluator& operator=(const Evaluator&) = delete;

  /// Returns the text that the template makes. Throws Failure.
  std::string run(const Body& body) {
    return captured([&] { run_body(body); });
  }
  /// Returns the line of the node evaluated last.
  int line() const { return m_line; }
  Meter& meter() { return m_meter; }

  // Values, counted by the meter. A safe text is Markup of Jinja2.
  Value make_text(std::string text, bool is_safe = false);
  Value make_like(const Value& model, std::string text) {
    return make_text(std::move(text), is_safe(model));
  }
  Value make_sequence(std::vector<Value> values, Sequence::Shape shape = Sequence::Shape::list);
  Value make_tuple(std::vector<Value> values) {
    return make_sequence(std::move(values), Sequence::Shape::tuple);
  }
  Value make_dict(std::vector<std::pair<Value, Value>> items);
  Value make_namespace(std::map<std::string, Value, std::less<>> attributes);
  /// Adds or replaces a key.
  void put(std::vector<std::pair<Value, Value>>& items, Value key, Value value);

  /// Returns str(value).
  std::string text_of(const Value& value);
  /// Returns list(value).
  std::vector<Value> elements_of(const Value& value);
  /// Returns value.name and value[key], undefined if there is neither an attribute nor an item.
  Value attribute(const Value& value, std::string_view name);
  Value item(const Value& value, const Value& key);
  /// Returns the value that filters find by an attribute: a name, a number, or several with dots
  /// between them. None and null stand for the value itself. `otherwise` replaces undefined values,
  /// unless it is null.
  Value attribute_of(const Value& value, const Value* attribute, const Value* otherwise = nullptr);
  /// Whether `element in container`.
  bool contains(const Value& container, const Value& element);
  Value call(const Value& callee, Arguments& arguments);
  /// Calls a filter or test. Null: there is none of the name.
  Value apply(const Builtin* function, std::string_view kind, std::string_view name,
              const Value& value, Arguments& arguments);
  /// Runs the recursive loop of `loop` on other values. Returns its text.
  Value recurse(const Loop& loop, const Value& iterable);

  // What parsed expressions and statements do.
  Value evaluate(const Expression& expression);
  Arguments arguments_of(const ArgumentList& list);
  Value variable(const std::string& name);
  void set(std::string_view name, Value value) { m_scope->variables[name] = std::move(value); }
  void assign(const Target& target, const Value& value);
  void write(const Value& value);
  void run_body(const Body& body);
  /// Calls `run` with a scope of its own.
  template <class Run>
  void inside(const Run& run) {
    inside(m_scope, run);
  }
  void run_loop(const LoopBlock& block) {
    run_loop(block, evaluate(block.iterable), std::shared_ptr<Scope>(m_scope), 0);
  }
  /// Returns the text of a block after its filters. Nothing: a loop ends or continues in it.
  std::optional<Value> filtered_block(const Body& body, const Expression& filters);
  Value make_macro(const Macro& macro);
  /// Names the line of messages.
  void at(int line) { m_line = line; }

  enum class Flow { normal, next, stop };
  Flow flow = Flow::normal;    // next and stop: of the innermost loop
  std::optional<Value> given;  // to the innermost filter of a block, or to the call of a call block

 private:
  /// Runs in a new scope inside of `parent`.
  template <class Run>
  void inside(std::shared_ptr<Scope> parent, const Run& run) {
    auto outer = std::exchange(m_scope, std::make_shared<Scope>(Scope{{}, std::move(parent)}));
    run();
    m_scope = std::move(outer);
  }
  /// Returns what is written.
  template <class Run>
  std::string captured(const Run& run) {
    std::string text;
    std::string* const outer = std::exchange(m_output, &text);
    run();
    m_output = outer;
    return text;
  }
  /// Bounds the recursion.
  void enter();

  void run_loop(const LoopBlock& block, const Value& iterable, const std::shared_ptr<Scope>& scope,
                int level);
  Value call_macro(const Callable& callable, Arguments& arguments);
  void bind(const Macro& macro, Arguments& arguments);
  void keep(const std::shared_ptr<Scope>& scope);

  Meter& m_meter;
  std::shared_ptr<Scope> m_scope;
  std::string* m_output = nullptr;
  int m_line = 1;
  int m_level = 0;
  std::deque<Namespace> m_spaces;
  std::deque<Loop> m_loops;
  std::vector<std::shared_ptr<Scope>> m_kept;  // scopes that macros refer to
};

// ---- Python's operators ------------------------------------------------------------------------

/// Returns `a operation b` for +, -, *, /, //, % and **. Throws Failure for other types and for
/// integers beyond 64 bits.
Value arithmetic(Evaluator& evaluator, Operator operation, const Value& a, const Value& b);
/// Returns -value.
Value negated(const Value& value);
/// Returns whether `a operation b` holds.
bool holds(Evaluator& evaluator, Operator operation, const Value& a, const Value& b);
/// Returns value[begin:end:step]; none stands for an absent limit. Throws Failure for values that
/// cannot be sliced.
Value sliced(Evaluator& evaluator, const Value& value, const Value& begin, const Value& end,
             const Value& step);

// ---- Tables -------------------------------------------------------------------------------------

/// Throws Failure for a name that no attribute of a namespace may have.
void require_public(std::string_view name);

/// Parts of the language in tables. They return null for unknown names.
const Builtin* find_filter(std::string_view name);
const Builtin* find_sequence_filter(std::string_view name);
const Builtin* find_test(std::string_view name);
const Builtin* find_global(std::string_view name);
/// Returns the method of a value's type.
const Builtin* find_method(const Value& value, std::string_view name);

}  // namespace kvzap::jinja
