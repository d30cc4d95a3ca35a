#include "jinja/value.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "files/quote.hpp"
#include "jinja/unicode.hpp"

namespace kvzap::jinja {

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

Value::Value(std::string text) {
  const std::int64_t length = length_of(text);
  m_value = std::make_shared<const Text>(Text{std::move(text), length, false});
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

// ---- Parameters ---------------------------------------------------------------------------------

Parameters::Parameters(std::string_view function, const Arguments& arguments,
                       std::initializer_list<std::string_view> names, std::size_t required)
    : m_function(function), m_values(names.size()) {
  if (arguments.positional.size() > names.size()) {
    throw Failure(fmt::format("{} takes at most {} arguments, found {}", function, names.size(),
                              arguments.positional.size()));
  }
  for (std::size_t i = 0; i < arguments.positional.size(); ++i) {
    m_values[i] = &arguments.positional[i];
  }
  for (const auto& [name, value] : arguments.named) {
    const auto found = std::find(names.begin(), names.end(), name);
    const auto index = static_cast<std::size_t>(found - names.begin());
    if (name.empty() || found == names.end() || m_values[index] != nullptr) {
      throw Failure(fmt::format("{}: unexpected argument {}", function, files::in_quotes(name)));
    }
    m_values[index] = &value;
  }
  for (std::size_t i = 0; i < required; ++i) {
    if (m_values[i] == nullptr) {
      throw Failure(fmt::format("{} needs at least {} arguments", function, required));
    }
  }
}

std::string_view Parameters::text(std::size_t index) const {
  const Text* const found = m_values[index]->text();
  if (found == nullptr) {
    throw Failure(
        fmt::format("{}: expected a string, found {}", m_function, m_values[index]->type_name()));
  }
  return found->bytes;
}

std::string_view Parameters::text_or(std::size_t index, std::string_view otherwise) const {
  return m_values[index] == nullptr ? otherwise : text(index);
}

std::int64_t Parameters::integer_or(std::size_t index, std::int64_t otherwise) const {
  if (m_values[index] == nullptr) return otherwise;
  const auto found = as_integer(*m_values[index]);
  if (!found) {
    throw Failure(
        fmt::format("{}: expected an integer, found {}", m_function, m_values[index]->type_name()));
  }
  return *found;
}

bool Parameters::flag(std::size_t index, bool otherwise) const {
  return m_values[index] == nullptr ? otherwise : is_true(*m_values[index]);
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

bool is_tuple(const Sequence& sequence) {
  return sequence.shape == Sequence::Shape::tuple || sequence.shape == Sequence::Shape::group;
}

bool are_comparable(const Sequence& a, const Sequence& b) {
  return (is_tuple(a) && is_tuple(b)) || (a.shape == b.shape && a.shape <= Sequence::Shape::range);
}

bool are_equal_dicts(const Dict& a, const Dict& b, Meter& meter) {
  if (a.items.size() != b.items.size()) return false;
  for (const auto& [key, value] : a.items) {
    const Value* const other = find(b, key, meter);
    if (other == nullptr || !are_equal(value, *other, meter)) return false;
  }
  return true;
}

}  // namespace

bool are_equal(const Value& a, const Value& b, Meter& meter) {
  meter.step();
  if (const auto* const text = a.text(), * const other = b.text(); text && other) {
    if (text->bytes.size() != other->bytes.size()) return false;
    meter.step(static_cast<std::int64_t>(text->bytes.size() / 64));
    return text->bytes == other->bytes;
  }
  if (a.integer() && b.integer()) return *a.integer() == *b.integer();
  if (const auto number = as_float(a), other = as_float(b); number && other) {
    return *number == *other;
  }
  if (const auto* const sequence = a.sequence(), * const other = b.sequence(); sequence && other) {
    if (sequence == other) return true;
    if (!are_comparable(*sequence, *other)) return false;
    return std::equal(sequence->values.begin(), sequence->values.end(), other->values.begin(),
                      other->values.end(),
                      [&](const Value& x, const Value& y) { return are_equal(x, y, meter); });
  }
  if (const auto* const dict = a.dict(), * const other = b.dict(); dict && other) {
    return dict == other || are_equal_dicts(*dict, *other, meter);
  }
  return are_same(a, b);
}

bool are_same(const Value& a, const Value& b) {
  if (a.is_undefined() && b.is_undefined()) return true;
  if (a.is_none() && b.is_none()) return true;
  if (a.boolean() && b.boolean()) return *a.boolean() == *b.boolean();
  if (a.integer() && b.integer()) return *a.integer() == *b.integer();
  if (a.floating() && b.floating()) return *a.floating() == *b.floating();
  if (a.text() && b.text()) return a.text() == b.text() || a.text()->bytes == b.text()->bytes;
  const auto is_shared = [](const auto* x, const auto* y) { return x != nullptr && x == y; };
  return is_shared(a.sequence(), b.sequence()) || is_shared(a.dict(), b.dict()) ||
         is_shared(a.callable(), b.callable()) || is_shared(a.loop(), b.loop()) ||
         is_shared(a.space(), b.space());
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
  if (sequence == nullptr || !is_tuple(*sequence)) return;
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
