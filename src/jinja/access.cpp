// Making and reading the evaluator's values.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "files/quote.hpp"
#include "jinja/evaluator.hpp"
#include "jinja/markup.hpp"
#include "jinja/printing.hpp"
#include "jinja/search.hpp"
#include "jinja/unicode.hpp"

namespace kvzap::jinja {
namespace {

int depth_of(const std::vector<Value>& values) {
  int depth = 0;
  for (const Value& value : values) depth = std::max(depth, value.depth());
  if (depth >= max_value_depth) throw Failure("a value is nested too deep");
  return depth + 1;
}

[[noreturn]] void fail_undefined(const Value& value) {
  throw Failure(fmt::format("{} is undefined", files::in_quotes(value.undefined()->name)));
}

}  // namespace

Value Evaluator::make_text(std::string text) {
  m_meter.allocate(text.size() + sizeof(Text));
  return Value(std::move(text));
}

Value Evaluator::make_safe(std::string text) {
  m_meter.allocate(text.size() + sizeof(Text));
  const std::int64_t length = length_of(text);
  return Value(std::make_shared<const Text>(Text{std::move(text), length, true}));
}

Value Evaluator::make_sequence(std::vector<Value> values, Sequence::Shape shape) {
  m_meter.allocate(sizeof(Sequence) + values.size() * sizeof(Value));
  auto sequence = std::make_shared<Sequence>();
  sequence->shape = shape;
  sequence->depth = depth_of(values);
  sequence->values = std::move(values);
  return Value(std::move(sequence));
}

Value Evaluator::make_dict(std::vector<std::pair<Value, Value>> items) {
  m_meter.allocate(sizeof(Dict) + items.size() * 2 * sizeof(Value));
  int depth = 0;
  for (const auto& [key, value] : items) depth = std::max({depth, key.depth(), value.depth()});
  if (depth >= max_value_depth) throw Failure("a value is nested too deep");
  return Value(std::make_shared<const Dict>(Dict{depth + 1, std::move(items)}));
}

Value Evaluator::make_method(std::string_view name, Function function, Value self) {
  auto callable = std::make_shared<Callable>();
  callable->name = name;
  callable->function = function;
  callable->self = std::move(self);
  return Value(std::shared_ptr<const Callable>(std::move(callable)));
}

Value Evaluator::make_namespace(std::map<std::string, Value, std::less<>> attributes) {
  m_meter.allocate(sizeof(Namespace) + attributes.size() * (sizeof(Value) + 64));
  return Value(&m_spaces.emplace_back(Namespace{std::move(attributes)}));
}

void Evaluator::put(std::vector<std::pair<Value, Value>>& items, Value key, Value value) {
  require_hashable(key, m_meter);
  m_meter.step(static_cast<std::int64_t>(items.size() / 16));
  m_meter.allocate(2 * sizeof(Value));
  const auto found = std::find_if(items.begin(), items.end(), [&](const auto& item) {
    if (item.first.is_string() != key.is_string()) return false;
    return key.is_string() ? item.first.text()->bytes == key.text()->bytes
                           : are_equal(item.first, key, m_meter);
  });
  if (found != items.end()) {
    found->second = std::move(value);
  } else {
    items.emplace_back(std::move(key), std::move(value));
  }
}

std::string Evaluator::text_of(const Value& value) {
  std::string text;
  append_text(text, value, m_meter);
  return text;
}

std::vector<Value> Evaluator::elements_of(const Value& value) {
  std::vector<Value> elements;
  if (value.is_undefined()) return elements;
  if (const Text* const text = value.text()) {
    m_meter.allocate(static_cast<std::size_t>(text->length) * (sizeof(Value) + sizeof(Text)));
    for (std::size_t offset = 0; offset < text->bytes.size();) {
      const std::size_t length = character_at(text->bytes, offset).second;
      elements.emplace_back(text->bytes.substr(offset, length));
      offset += length;
    }
    return elements;
  }
  if (Sequence* const sequence = value.sequence()) {
    m_meter.allocate(sequence->values.size() * sizeof(Value));
    if (sequence->shape != Sequence::Shape::iterator) return sequence->values;
    if (!std::exchange(sequence->consumed, true)) elements = std::move(sequence->values);
    sequence->values.clear();
    return elements;
  }
  if (const Dict* const dict = value.dict()) {
    m_meter.allocate(dict->items.size() * sizeof(Value));
    for (const auto& item : dict->items) elements.push_back(item.first);
    return elements;
  }
  throw Failure(fmt::format("a {} cannot be iterated over", value.type_name()));
}

namespace {

/// Methods that transformers' sandbox refuses, because they change their object. They hide a dict's
/// keys, as other methods do.
bool is_refused_method(const Value& value, std::string_view name) {
  constexpr std::string_view refused[] = {"clear",      "pop",    "popitem",
                                          "setdefault", "update", "fromkeys"};
  return value.dict() &&
         std::find(std::begin(refused), std::end(refused), name) != std::end(refused);
}

Value loop_attribute(Loop& loop, std::string_view name) {
  if (name == "index") return loop.index + 1;
  if (name == "index0") return loop.index;
  if (name == "first") return loop.index == 0;
  if (name == "last") return !loop.peek();
  if (name == "length") return loop.length();
  if (name == "revindex") return loop.length() - loop.index;
  if (name == "revindex0") return loop.length() - loop.index - 1;
  if (name == "depth") return std::int64_t{loop.level} + 1;
  if (name == "depth0") return std::int64_t{loop.level};
  if (name == "previtem") return loop.previous.value_or(Value(Undefined{"previtem"}));
  if (name == "nextitem") return loop.peek().value_or(Value(Undefined{"nextitem"}));
  return Undefined{name};
}

Value macro_attribute(Evaluator& evaluator, const Macro& macro, std::string_view name) {
  if (name == "name") return evaluator.make_text(macro.name);
  if (name == "caller") return macro.uses_caller;
  if (name == "catch_kwargs") return macro.uses_kwargs;
  if (name == "catch_varargs") return macro.uses_varargs;
  if (name != "arguments") return Undefined{name};
  std::vector<Value> parameters;
  for (const Parameter& parameter : macro.parameters) {
    parameters.push_back(evaluator.make_text(parameter.name));
  }
  return evaluator.make_sequence(std::move(parameters), Sequence::Shape::tuple);
}

}  // namespace

Value Evaluator::attribute(const Value& value, std::string_view name) {
  if (value.is_undefined()) fail_undefined(value);
  if (const Namespace* const space = value.space()) {
    const auto found = space->attributes.find(name);
    return found == space->attributes.end() ? Value(Undefined{name}) : found->second;
  }
  if (const Function function = find_method(value, name)) return make_method(name, function, value);
  if (is_refused_method(value, name)) return Undefined{name};
  if (Loop* const loop = value.loop()) return loop_attribute(*loop, name);
  if (value.callable() && value.callable()->macro) {
    return macro_attribute(*this, *value.callable()->macro, name);
  }
  if (value.is(Sequence::Shape::group)) {
    if (name == "grouper") return value.sequence()->values[0];
    if (name == "list") return value.sequence()->values[1];
  }
  if (const Dict* const dict = value.dict()) {
    if (const Value* const found = find(*dict, name, m_meter)) return *found;
  }
  return Undefined{name};
}

Value Evaluator::item(const Value& value, const Value& key) {
  if (value.is_undefined()) fail_undefined(value);
  const std::string_view name = key.text() ? std::string_view(key.text()->bytes) : "";
  if (const Dict* const dict = value.dict()) {
    const bool is_unhashable = key.dict() || key.is(Sequence::Shape::list);
    const Value* const found = is_unhashable ? nullptr : find(*dict, key, m_meter);
    if (found != nullptr) return *found;
  } else if (const auto index = as_integer(key)) {
    const Text* const text = value.text();
    const Sequence* const sequence = value.sequence();
    const bool has_items = text || (sequence && sequence->shape <= Sequence::Shape::range);
    const std::int64_t size = text        ? text->length
                              : has_items ? static_cast<std::int64_t>(sequence->values.size())
                                          : 0;
    const std::int64_t place = *index < 0 ? *index + size : *index;
    if (place < 0 || place >= size) return Undefined{};
    if (sequence) return sequence->values[static_cast<std::size_t>(place)];
    m_meter.step(place / 64);
    const std::size_t offset = offset_of(text->bytes, place);
    return make_like(*this, value,
                     text->bytes.substr(offset, character_at(text->bytes, offset).second));
  }
  if (!key.is_string()) return Undefined{};
  if (value.space() || value.loop() || value.callable() || value.is(Sequence::Shape::group)) {
    const Value found = attribute(value, name);
    return found.is_undefined() ? Value(Undefined{}) : found;
  }
  if (const Function function = find_method(value, name)) {
    return make_method("method", function, value);
  }
  return Undefined{};
}

bool Evaluator::contains(const Value& container, const Value& element) {
  if (const Text* const text = container.text()) {
    if (!element.is_string()) {
      throw Failure(fmt::format("'in' needs a string on its left, found {}", element.type_name()));
    }
    Searcher searcher(element.text()->bytes, m_meter);
    return searcher.first(text->bytes) != std::string::npos;
  }
  if (const Dict* const dict = container.dict()) return find(*dict, element, m_meter) != nullptr;
  if (const Sequence* const sequence = container.sequence()) {
    const auto is_element = [&](const Value& value) { return are_equal(value, element, m_meter); };
    if (sequence->shape != Sequence::Shape::iterator) {
      return std::any_of(sequence->values.begin(), sequence->values.end(), is_element);
    }
  }
  const std::vector<Value> elements = elements_of(container);
  return std::any_of(elements.begin(), elements.end(),
                     [&](const Value& value) { return are_equal(value, element, m_meter); });
}

}  // namespace kvzap::jinja
