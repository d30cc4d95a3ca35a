// Making and reading the evaluator's values.
#include <fmt/format.h>

#include <algorithm>

#include "files/quote.hpp"
#include "jinja/evaluator.hpp"
#include "jinja/printing.hpp"
#include "jinja/unicode.hpp"

namespace kvzap::jinja {
namespace {

int depth_of(const std::vector<Value>& values) {
  int depth = 0;
  for (const Value& value : values) depth = std::max(depth, value.depth());
  if (depth >= max_value_depth) throw Failure("a value is nested too deep");
  return depth + 1;
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
  for (const auto& parameter : macro.parameters) {
    parameters.push_back(evaluator.make_text(parameter.first));
  }
  return evaluator.make_tuple(std::move(parameters));
}

Value method_of(const Value& value, const Builtin& method) {
  if (method.function == nullptr) return Undefined{method.name};
  return std::make_shared<const Callable>(Callable{&method, value});
}

}  // namespace

Value Evaluator::make_text(std::string text, bool is_safe) {
  m_meter.allocate(text.size() + sizeof(Text));
  return Value(std::move(text), is_safe);
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
    for (const auto& [character, bytes] : Characters(text->bytes)) {
      elements.emplace_back(std::string(bytes));
    }
    return elements;
  }
  if (Sequence* const sequence = value.sequence()) {
    m_meter.allocate(sequence->values.size() * sizeof(Value));
    if (sequence->shape != Sequence::Shape::iterator) return sequence->values;
    return std::exchange(sequence->values, {});  // an iterator can be read once
  }
  if (const Dict* const dict = value.dict()) {
    m_meter.allocate(dict->items.size() * sizeof(Value));
    for (const auto& item : dict->items) elements.push_back(item.first);
    return elements;
  }
  throw Failure(fmt::format("a {} cannot be iterated over", value.type_name()));
}

Value Evaluator::attribute(const Value& value, std::string_view name) {
  require_defined(value);
  if (const Namespace* const space = value.space()) {
    const auto found = space->attributes.find(name);
    return found == space->attributes.end() ? Value(Undefined{name}) : found->second;
  }
  if (const Builtin* const method = find_method(value, name)) return method_of(value, *method);
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
  require_defined(value);
  const std::string_view name = key.text() ? std::string_view(key.text()->bytes) : "";
  if (const Dict* const dict = value.dict()) {
    const bool is_unhashable = key.dict() || key.is(Sequence::Shape::list);
    const Value* const found = is_unhashable ? nullptr : find(*dict, key, m_meter);
    if (found != nullptr) return *found;
  } else if (const auto index = as_integer(key)) {
    const Text* const text = value.text();
    const Sequence* const sequence = value.sequence();
    std::int64_t size = text ? text->length : 0;
    if (sequence && sequence->has_items())
      size = static_cast<std::int64_t>(sequence->values.size());
    const std::int64_t place = *index < 0 ? *index + size : *index;
    if (place < 0 || place >= size) return Undefined{};
    if (sequence) return sequence->values[static_cast<std::size_t>(place)];
    m_meter.step(place / 64);
    const std::size_t offset = offset_of(text->bytes, place);
    return make_like(value, text->bytes.substr(offset, character_at(text->bytes, offset).second));
  }
  if (!key.is_string()) return Undefined{};
  if (value.space() || value.loop() || value.callable() || value.is(Sequence::Shape::group)) {
    const Value found = attribute(value, name);
    return found.is_undefined() ? Value(Undefined{}) : found;
  }
  const Builtin* const method = find_method(value, name);
  return method ? method_of(value, *method) : Undefined{};
}

Value Evaluator::attribute_of(const Value& value, const Value* attribute, const Value* otherwise) {
  if (attribute == nullptr || attribute->is_none()) return value;
  const auto item_of = [&](const Value& object, const Value& key) {
    Value found = item(object, key);
    const bool replaces = found.is_undefined() && otherwise != nullptr && !otherwise->is_none();
    return replaces ? *otherwise : found;
  };
  if (!attribute->is_string()) return item_of(value, *attribute);
  Value result = value;
  for (std::string_view rest = attribute->text()->bytes;;) {
    m_meter.step();
    const std::size_t end = std::min(rest.find('.'), rest.size());
    const std::string name(rest.substr(0, end));
    const bool is_number = !name.empty() && name.size() < 10 &&
                           name.find_first_not_of("0123456789") == std::string::npos;
    result = item_of(result, is_number ? Value(std::stoi(name)) : Value(name));
    if (end == rest.size()) return result;
    rest.remove_prefix(end + 1);
  }
}

bool Evaluator::contains(const Value& container, const Value& element) {
  if (const Text* const text = container.text()) {
    if (!element.is_string()) {
      throw Failure(fmt::format("'in' needs a string on its left, found {}", element.type_name()));
    }
    return find_text(text->bytes, element.text()->bytes, 0, m_meter) != std::string::npos;
  }
  if (const Dict* const dict = container.dict()) return find(*dict, element, m_meter) != nullptr;
  const auto has_element = [&](const std::vector<Value>& values) {
    return std::any_of(values.begin(), values.end(),
                       [&](const Value& value) { return are_equal(value, element, m_meter); });
  };
  const Sequence* const sequence = container.sequence();
  const bool is_stored = sequence && sequence->shape != Sequence::Shape::iterator;
  return is_stored ? has_element(sequence->values) : has_element(elements_of(container));
}

}  // namespace kvzap::jinja
