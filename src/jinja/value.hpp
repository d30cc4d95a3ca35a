// Values of templates, with Python's types and semantics.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
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
struct Arguments;
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
  bool consumed = false;  // an iterator that has been read
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

using Function = Value (*)(Evaluator&, const Value& self, Arguments&);

struct Callable;

class Value {
 public:
  Value() : m_value(None{}) {}
  Value(Undefined value) : m_value(value) {}
  Value(bool value) : m_value(value) {}
  Value(std::int64_t value) : m_value(value) {}
  Value(int) = delete;
  Value(const void*) = delete;
  Value(double value) : m_value(value) {}
  explicit Value(std::string text);
  Value(std::shared_ptr<const Text> text) : m_value(std::move(text)) {}
  Value(std::shared_ptr<Sequence> sequence) : m_value(std::move(sequence)) {}
  Value(std::shared_ptr<const Dict> dict) : m_value(std::move(dict)) {}
  Value(std::shared_ptr<const Callable> callable) : m_value(std::move(callable)) {}
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
  Loop* loop() const {
    const auto* const found = std::get_if<Loop*>(&m_value);
    return found == nullptr ? nullptr : *found;
  }
  Namespace* space() const {
    const auto* const found = std::get_if<Namespace*>(&m_value);
    return found == nullptr ? nullptr : *found;
  }

  /// A list, tuple or other sequence of that shape.
  bool is(Sequence::Shape shape) const {
    return sequence() != nullptr && sequence()->shape == shape;
  }

  /// Python's type name, for messages.
  std::string_view type_name() const;
  /// Nesting of containers: 0 for plain values.
  int depth() const;

 private:
  template <class Shared>
  auto pointer() const -> decltype(std::declval<Shared>().get()) {
    const auto* const found = std::get_if<Shared>(&m_value);
    return found == nullptr ? nullptr : found->get();
  }

  std::variant<Undefined, None, bool, std::int64_t, double, std::shared_ptr<const Text>,
               std::shared_ptr<Sequence>, std::shared_ptr<const Dict>,
               std::shared_ptr<const Callable>, Loop*, Namespace*>
      m_value;
};

/// A function, a method with its object, or a macro with the scope that it was defined in.
struct Callable {
  std::string_view name;
  Function function = nullptr;
  Value self;
  const Macro* macro = nullptr;
  Scope* scope = nullptr;
};

/// Arguments of a call.
struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
};

/// Matches arguments with a function's parameters. Throws Failure for missing, unknown or repeated
/// arguments.
class Parameters {
 public:
  Parameters(std::string_view function, const Arguments& arguments,
             std::initializer_list<std::string_view> names, std::size_t required = 0);

  /// Returns the argument, or null if it is absent.
  const Value* operator[](std::size_t index) const { return m_values[index]; }
  /// Throws Failure if the argument has another type.
  std::string_view text(std::size_t index) const;
  std::string_view text_or(std::size_t index, std::string_view otherwise) const;
  std::int64_t integer_or(std::size_t index, std::int64_t otherwise) const;
  bool flag(std::size_t index, bool otherwise = false) const;

 private:
  std::string_view m_function;
  std::vector<const Value*> m_values;
};

/// Python's bool(value).
bool is_true(const Value& value);
/// Returns an integer or boolean as an integer, others as nothing.
std::optional<std::int64_t> as_integer(const Value& value);
/// Returns a number or boolean as a float, others as nothing.
std::optional<double> as_float(const Value& value);
/// Python's a == b.
bool are_equal(const Value& a, const Value& b, Meter& meter);
/// Python's `is`, as far as templates can rely on it.
bool are_same(const Value& a, const Value& b);
/// Returns -1, 0 or 1 as a is less than, equal to or greater than b, and nothing for NaN. Throws
/// Failure for types without order.
std::optional<int> order_of(const Value& a, const Value& b, Meter& meter);
/// Returns the value of a key, or null.
const Value* find(const Dict& dict, const Value& key, Meter& meter);
const Value* find(const Dict& dict, std::string_view key, Meter& meter);
/// Throws Failure for values that Python cannot hash.
void require_hashable(const Value& value, Meter& meter);

}  // namespace kvzap::jinja
