// Values of templates, with Python's types and semantics.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace kvzap::jinja {

class Evaluator;
class Value;
struct Builtin;
struct Loop;
struct Macro;
struct Scope;

/// Why a template cannot be read or rendered. The template adds its name and the line.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Bounds on a rendering. Each function throws Failure when its bound is exceeded.
class Meter {
 public:
  Meter(std::int64_t steps, std::int64_t bytes) : m_steps(steps), m_bytes(bytes) {}

  /// Adds 64 times the bytes of an input to the bounds.
  void grow(std::size_t size);
  /// Counts work: an evaluated node, or about 64 bytes of a string.
  void step(std::int64_t steps = 1);
  /// Counts bytes of new strings, lists and output. The count never falls, so it bounds time, too.
  void allocate(std::size_t bytes);

 private:
  std::int64_t m_steps;
  std::int64_t m_bytes;
};

/// Containers are nested at most this deep, so functions may recurse.
inline constexpr int max_value_depth = 100;

struct Undefined {
  std::string_view name;  // of a variable or attribute in the template, for messages
};
struct None {};
inline bool operator==(Undefined, Undefined) { return true; }
inline bool operator==(None, None) { return true; }

struct Text {
  std::string bytes;
  std::int64_t length;   // in code points
  bool is_safe = false;  // escaped for HTML: + escapes the other string
};

/// A Python object that iterates over values. A `group` is the tuple that groupby makes.
struct Sequence {
  enum class Shape { list, tuple, group, range, keys, values, items, iterator };
  Shape shape = Shape::list;
  int depth = 1;  // of nesting
  std::vector<Value> values;

  /// Whether an index gives an element.
  bool has_items() const { return shape <= Shape::range; }
  bool is_tuple() const { return shape == Shape::tuple || shape == Shape::group; }
};

/// Keeps the order of insertion.
struct Dict {
  int depth = 1;
  std::vector<std::pair<Value, Value>> items;
};

/// The object of namespace(): the only value that a template changes.
struct Namespace {
  std::map<std::string, Value, std::less<>> attributes;
};

struct Callable;

class Value {
 public:
  Value() : m_value(None{}) {}
  Value(Undefined value) : m_value(value) {}
  Value(bool value) : m_value(value) {}
  Value(std::int64_t value) : m_value(value) {}
  Value(int value) : m_value(std::int64_t{value}) {}
  Value(std::size_t value) : m_value(static_cast<std::int64_t>(value)) {}
  Value(const void*) = delete;
  Value(double value) : m_value(value) {}
  explicit Value(std::string text, bool is_safe = false);
  template <class Object>
  Value(std::shared_ptr<Object> object) : m_value(std::move(object)) {}
  /// The evaluator owns namespaces and loops, because they may contain themselves.
  explicit Value(Namespace* space) : m_value(space) {}
  explicit Value(Loop* loop) : m_value(loop) {}

  bool is_undefined() const { return std::holds_alternative<Undefined>(m_value); }
  bool is_none() const { return std::holds_alternative<None>(m_value); }
  bool is_string() const { return std::holds_alternative<std::shared_ptr<const Text>>(m_value); }

  const Undefined* undefined() const { return std::get_if<Undefined>(&m_value); }
  const bool* boolean() const { return std::get_if<bool>(&m_value); }
  const std::int64_t* integer() const { return std::get_if<std::int64_t>(&m_value); }
  const double* floating() const { return std::get_if<double>(&m_value); }
  const Text* text() const { return pointer<std::shared_ptr<const Text>>(); }
  Sequence* sequence() const { return pointer<std::shared_ptr<Sequence>>(); }
  const Dict* dict() const { return pointer<std::shared_ptr<const Dict>>(); }
  const Callable* callable() const { return pointer<std::shared_ptr<const Callable>>(); }
  Loop* loop() const { return pointer<Loop*>(); }
  Namespace* space() const { return pointer<Namespace*>(); }

  /// A list, tuple or other sequence of that shape.
  bool is(Sequence::Shape shape) const {
    return sequence() != nullptr && sequence()->shape == shape;
  }

  /// Python's `is`, as far as templates can rely on it.
  bool is_same(const Value& other) const {
    return text() && other.text() ? text()->bytes == other.text()->bytes : m_value == other.m_value;
  }
  /// Python's type name, for messages.
  std::string_view type_name() const;
  /// Nesting of containers: 0 for plain values.
  int depth() const;

 private:
  template <class Pointer>
  auto pointer() const -> decltype(&*std::declval<Pointer>()) {
    const auto* const found = std::get_if<Pointer>(&m_value);
    return found == nullptr || *found == nullptr ? nullptr : &**found;
  }

  std::variant<Undefined, None, bool, std::int64_t, double, std::shared_ptr<const Text>,
               std::shared_ptr<Sequence>, std::shared_ptr<const Dict>,
               std::shared_ptr<const Callable>, Loop*, Namespace*>
      m_value;
};

/// Whether the value is a string that is escaped for HTML.
inline bool is_safe(const Value& value) { return value.text() && value.text()->is_safe; }
/// Python's bool(value).
bool is_true(const Value& value);

/// A builtin function, a method with its object, or a macro with the scope of its definition.
struct Callable {
  const Builtin* builtin = nullptr;
  Value self;
  const Macro* macro = nullptr;
  Scope* scope = nullptr;
};

/// Arguments of a call.
struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
};

/// A call of a builtin, with its arguments in the order of its parameters.
struct Call {
  /// Throws Failure for missing, unknown and repeated arguments.
  Call(Evaluator& with, const Builtin& what, const Value& object, Arguments& values);

  /// Returns the argument, or null if it is absent.
  const Value* operator[](std::size_t index) const { return m_in_order[index]; }
  /// Whether the argument is given and not none.
  bool has(std::size_t index) const { return m_in_order[index] && !m_in_order[index]->is_none(); }
  /// Returns the argument, or `otherwise` if it is absent. Throws Failure for other types.
  std::string_view text(std::size_t index, std::string_view otherwise = {}) const;
  std::int64_t integer(std::size_t index, std::int64_t otherwise = 0) const;
  bool flag(std::size_t index) const { return m_in_order[index] && is_true(*m_in_order[index]); }
  /// Returns the number of spaces or the string that an argument gives to indent lines.
  std::string indent(std::size_t index, std::int64_t otherwise, std::int64_t most) const;
  /// Throws Failure "FUNCTION: message".
  [[noreturn]] void fail(std::string_view message) const;

  Evaluator& evaluator;
  Meter& meter;
  const Builtin& builtin;
  const Value& self;  // a filter's or test's value, or a method's object
  Arguments& arguments;

 private:
  std::array<const Value*, 4> m_in_order{};
};

/// An entry of a table: a filter, test, method or global function.
struct Builtin {
  std::string_view name;
  Value (*function)(Call&);  // null: templates may not call it
  std::size_t required = 0;  // arguments
  // "_": only positional arguments match. "*" takes all arguments.
  std::array<std::string_view, 4> parameters{};
};

/// Returns the entry of a table, or null.
template <std::size_t size>
const Builtin* find_in(const Builtin (&table)[size], std::string_view name) {
  for (const Builtin& entry : table) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

/// Throws Failure for an undefined value.
void require_defined(const Value& value);
/// Returns an integer or boolean as an integer, others as nothing.
std::optional<std::int64_t> as_integer(const Value& value);
/// Returns a number or boolean as a float, others as nothing.
std::optional<double> as_float(const Value& value);
/// Python's a == b.
bool are_equal(const Value& a, const Value& b, Meter& meter);
/// Returns -1, 0 or 1 as a is less than, equal to or greater than b, and nothing for NaN. Throws
/// Failure for types without order.
std::optional<int> order_of(const Value& a, const Value& b, Meter& meter);
/// Returns the value of a key, or null.
const Value* find(const Dict& dict, const Value& key, Meter& meter);
const Value* find(const Dict& dict, std::string_view key, Meter& meter);
/// Throws Failure for values that Python cannot hash.
void require_hashable(const Value& value, Meter& meter);

}  // namespace kvzap::jinja
