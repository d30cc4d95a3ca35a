// Renders a parsed template. One evaluator renders once.
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
  const Statement* statement = nullptr;
  Scope* scope = nullptr;  // around a recursive loop

  bool advance();
  const std::optional<Value>& peek();
  std::int64_t length();

 private:
  std::optional<Value> fetch();
};

class Evaluator {
 public:
  explicit Evaluator(Meter& meter) : m_meter(meter), m_scope(std::make_shared<Scope>()) {}
  ~Evaluator();
  Evaluator(const Evaluator&) = delete;
  Evaluator& operator=(const Evaluator&) = delete;

  /// Sets a variable of the template.
  void set(std::string_view name, Value value) { m_scope->variables[name] = std::move(value); }
  /// Returns the text that the template makes. Throws Failure.
  std::string run(const Body& body);
  /// Returns the line of the node evaluated last.
  int line() const { return m_line; }

  Meter& meter() { return m_meter; }

  // Values, counted by the meter.
  Value make_text(std::string text);
  Value make_safe(std::string text);  // Markup of Jinja2
  Value make_sequence(std::vector<Value> values, Sequence::Shape shape = Sequence::Shape::list);
  Value make_dict(std::vector<std::pair<Value, Value>> items);
  Value make_method(std::string_view name, Function function, Value self);
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
  Value call(const Value& callee, Arguments& arguments);
  Value filtered(std::string_view filter, const Value& value, Arguments& arguments);
  bool tested(std::string_view test, const Value& value, Arguments& arguments);
  /// Whether `element in container`.
  bool contains(const Value& container, const Value& element);
  /// Runs the recursive loop of `loop` on other values. Returns its text.
  Value recurse(const Loop& loop, const Value& iterable);

 private:
  enum class Flow { normal, next, stop };

  /// Bounds the recursion.
  class Level {
   public:
    explicit Level(Evaluator& evaluator);
    ~Level() { --m_level; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    int& m_level;
  };
  class Capture;
  class Inside;

  Flow run_body(const Body& body);
  Flow run_statement(const Statement& statement);
  Flow run_branch(const Statement& statement);
  Flow run_loop(const Statement& statement, const Value& iterable,
                const std::shared_ptr<Scope>& scope, int level);
  Flow run_with(const Statement& statement);
  Flow run_block_assignment(const Statement& statement);
  void run_call_block(const Statement& statement);
  Flow run_filter_block(const Statement& statement);
  void write(const Value& value);
  void assign(const Target& target, const Value& value);
  Value make_macro(const Macro& macro);
  Value call_macro(const Callable& callable, Arguments& arguments);
  void bind(const Macro& macro, Arguments& arguments);
  void keep(const std::shared_ptr<Scope>& scope);

  Value evaluate(const Expression& node);
  Value evaluate_name(const Expression& node);
  Value evaluate_list(const Expression& node, Sequence::Shape shape);
  Value evaluate_dict(const Expression& node);
  Value evaluate_conditional(const Expression& node);
  Value evaluate_logic(const Expression& node);
  Value evaluate_compare(const Expression& node);
  Value evaluate_concatenation(const Expression& node);
  Value evaluate_slice(const Expression& node);
  Value evaluate_call(const Expression& node, const Value* caller = nullptr);
  Value evaluate_filter(const Expression& node, const Value* value = nullptr);
  Value evaluate_test(const Expression& node);
  Arguments arguments_of(const ArgumentList& list);

  Meter& m_meter;
  std::shared_ptr<Scope> m_scope;
  std::string* m_output = nullptr;
  int m_line = 1;
  int m_level = 0;
  std::deque<Namespace> m_spaces;
  std::deque<Loop> m_loops;
  std::vector<std::shared_ptr<Scope>> m_kept;  // scopes that macros refer to
};

/// Parts of the language in tables. They return null for unknown names.
Function find_filter(std::string_view name);
using Test = bool (*)(Evaluator&, const Value&, Arguments&);
Test find_test(std::string_view name);
Function find_global(std::string_view name);
/// Returns the method of a value's type.
Function find_method(const Value& value, std::string_view name);

}  // namespace kvzap::jinja
