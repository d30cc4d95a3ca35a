#include "jinja/value.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "files/quote.hpp"
#include "jinja/evaluator.hpp"
#include "jinja/unicode.hpp"

namespace kvzap::jinja {

void Meter::grow(std::size_t size) {
  m_steps += 64 * static_cast<std::int64_t>(size);
  m_bytes += 64 * static_cast<std::int64_t>(size);
}

void Meter::step(std::int64_t steps) {
  if ((m_steps -= steps) < 0) throw Failure("the template takes too many steps");
}

void Meter::allocate(std::size_t bytes) {
  if (bytes > static_cast<std::size_t>(m_bytes)) {
    throw Failure("the template's output and values take too much memory");
  }
  m_bytes -= static_cast<std::int64_t>(bytes);
  step(static_cast<std::int64_t>(bytes / 64));
}

Value::Value(std::string text, bool is_safe) {
  const std::int64_t length = length_of(text);
  m_value = std::make_shared<const Text>(Text{std::move(text), length, is_safe});
}

std::string_view Value::type_name() const {
  constexpr std::string_view names[] = {"Undefined", "NoneType", "bool",     "int",
                                        "float",     "str",      "",         "dict",
                                        "function",  "loop",     "Namespace"};
  constexpr std::string_view shapes[] = {"list",      "tuple",       "tuple",      "range",
                                         "dict_keys", "dict_values", "dict_items", "generator"};
  const Sequence* const found = sequence();
  return found ? shapes[static_cast<std::size_t>(found->shape)] : names[m_value.index()];
}

int Value::depth() const {
  if (const auto* const found = sequence()) return found->depth;
  if (const auto* const found = dict()) return found->depth;
  if (const auto* const found = callable()) return found->self.depth() + 1;
  return 0;
}

// ---- Calls --------------------------------------------------------------------------------------

Call::Call(Evaluator& with, const Builtin& what, const Value& object, Arguments& values)
    : evaluator(with), meter(with.meter()), builtin(what), self(object), arguments(values) {
  const auto& names = what.parameters;
  if (names[0] == "*") return;
  const std::size_t most = std::find(names.begin(), names.end(), "") - names.begin();
  const std::size_t given = values.positional.size();
  if (given > most) {
    throw Failure(fmt::format("{} takes at most {} arguments, found {}", what.name, most, given));
  }
  for (std::size_t i = 0; i < given; ++i) m_in_order[i] = &values.positional[i];
  for (const auto& [name, value] : values.named) {
    const std::size_t index = std::find(names.begin(), names.begin() + most, name) - names.begin();
    if (name == "_" || index == most || m_in_order[index]) {
      fail(fmt::format("unexpected argument {}", files::in_quotes(name)));
    }
    m_in_order[index] = &value;
  }
  if (std::count(m_in_order.begin(), m_in_order.begin() + what.required, nullptr) > 0) {
    throw Failure(fmt::format("{} needs at least {} arguments", what.name, what.required));
  }
}

void Call::fail(std::string_view message) const {
  throw Failure(fmt::format("{}: {}", builtin.name, message));
}

std::string_view Call::text(std::size_t index, std::string_view otherwise) const {
  const Value* const value = m_in_order[index];
  if (value == nullptr) return otherwise;
  if (!value->is_string()) fail(fmt::format("expected a string, found {}", value->type_name()));
  return value->text()->bytes;
}

std::int64_t Call::integer(std::size_t index, std::int64_t otherwise) const {
  const Value* const value = m_in_order[index];
  if (value == nullptr) return otherwise;
  if (const auto found = as_integer(*value)) return *found;
  fail(fmt::format("expected an integer, found {}", value->type_name()));
}

std::string Call::indent(std::size_t index, std::int64_t otherwise, std::int64_t most) const {
  if (m_in_order[index] && m_in_order[index]->is_string()) return std::string(text(index));
  const std::int64_t width = integer(index, otherwise);
  if (width > most) fail("the width is too large");
  return std::string(static_cast<std::size_t>(std::max<std::int64_t>(width, 0)), ' ');
}

// ---- Operations ---------------------------------------------------------------------------------

bool is_true(const Value& value) {
  if (value.is_undefined() || value.is_none()) return false;
  if (const auto* const boolean = value.boolean()) return *boolean;
  if (const auto* const integer = value.integer()) return *integer != 0;
  if (const auto* const floating = value.floating()) return *floating != 0;
  if (const auto* const text = value.text()) return !text->bytes.empty();
  if (const auto* const dict = value.dict()) return !dict->items.empty();
  if (const auto* const sequence = value.sequence()) {
    return sequence->shape == Sequence::Shape::iterator || !sequence->values.empty();
  }
  return true;
}

void require_defined(const Value& value) {
  const Undefined* const undefined = value.undefined();
  if (undefined) throw Failure(fmt::format("{} is undefined", files::in_quotes(undefined->name)));
}

std::optional<std::int64_t> as_integer(const Value& value) {
  if (const auto* const integer = value.integer()) return *integer;
  if (const auto* const boolean = value.boolean()) return *boolean ? 1 : 0;
  return std::nullopt;
}

std::optional<double> as_float(const Value& value) {
  if (const auto* const floating = value.floating()) return *floating;
  const auto integer = as_integer(value);
  return integer ? std::optional<double>(static_cast<double>(*integer)) : std::nullopt;
}

namespace {

bool are_comparable(const Sequence& a, const Sequence& b) {
  return (a.is_tuple() && b.is_tuple()) || (a.shape == b.shape && a.has_items());
}

}  // namespace

bool are_equal(const Value& a, const Value& b, Meter& meter) {
  meter.step();
  if (const auto* const text = a.text(), * const other = b.text(); text && other) {
    if (text->bytes.size() != other->bytes.size()) return false;
    meter.step(static_cast<std::int64_t>(text->bytes.size() / 64));
    return text->bytes == other->bytes;
  }
  if (const auto x = as_integer(a), y = as_integer(b); x && y) return *x == *y;
  if (const auto x = as_float(a), y = as_float(b); x && y) return *x == *y;
  if (a.is_same(b)) return true;
  if (const auto* const sequence = a.sequence(), * const other = b.sequence(); sequence && other) {
    return are_comparable(*sequence, *other) &&
           std::equal(sequence->values.begin(), sequence->values.end(), other->values.begin(),
                      other->values.end(),
                      [&](const Value& x, const Value& y) { return are_equal(x, y, meter); });
  }
  const auto *const dict = a.dict(), *const other = b.dict();
  return dict && other && dict->items.size() == other->items.size() &&
         std::all_of(dict->items.begin(), dict->items.end(), [&](const auto& item) {
           const Value* const found = find(*other, item.first, meter);
           return found && are_equal(item.second, *found, meter);
         });
}

std::optional<int> order_of(const Value& a, const Value& b, Meter& meter) {
  meter.step();
  const auto order = [](const auto& x, const auto& y) -> std::optional<int> {
    if (x < y) return -1;
    if (y < x) return 1;
    return x == y ? std::optional<int>(0) : std::nullopt;
  };
  if (const auto* const text = a.text(), * const other = b.text(); text && other) {
    const std::size_t shorter = std::min(text->bytes.size(), other->bytes.size());
    meter.step(static_cast<std::int64_t>(shorter / 64));
    return order(text->bytes, other->bytes);
  }
  if (const auto x = as_integer(a), y = as_integer(b); x && y) return order(*x, *y);
  if (const auto x = as_float(a), y = as_float(b); x && y) return order(*x, *y);
  const auto *const sequence = a.sequence(), *const other = b.sequence();
  if (sequence && other && are_comparable(*sequence, *other) &&
      sequence->shape != Sequence::Shape::range) {
    const auto& [x, y] = std::tie(sequence->values, other->values);
    for (std::size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
      if (!are_equal(x[i], y[i], meter)) return order_of(x[i], y[i], meter);
    }
    return order(x.size(), y.size());
  }
  throw Failure(
      fmt::format("values of types {} and {} have no order", a.type_name(), b.type_name()));
}

void require_hashable(const Value& value, Meter& meter) {
  meter.step();
  const Sequence* const sequence = value.sequence();
  if (value.dict() || (sequence && sequence->shape == Sequence::Shape::list)) {
    throw Failure(fmt::format("a {} cannot be a key", value.type_name()));
  }
  if (sequence == nullptr || !sequence->is_tuple()) return;
  for (const Value& element : sequence->values) require_hashable(element, meter);
}

const Value* find(const Dict& dict, const Value& key, Meter& meter) {
  if (const Text* const text = key.text()) return find(dict, text->bytes, meter);
  require_hashable(key, meter);
  for (const auto& [name, value] : dict.items) {
    if (!name.is_string() && are_equal(name, key, meter)) return &value;
  }
  return nullptr;
}

const Value* find(const Dict& dict, std::string_view key, Meter& meter) {
  meter.step(1 + static_cast<std::int64_t>(dict.items.size() / 16));
  for (const auto& [name, value] : dict.items) {
    const Text* const text = name.text();
    if (text != nullptr && text->bytes == key) return &value;
  }
  return nullptr;
}

}  // namespace kvzap::jinja
