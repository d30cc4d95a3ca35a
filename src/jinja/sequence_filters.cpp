// Filters of sequences and dicts.
#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "files/quote.hpp"
#include "jinja/filters.hpp"
#include "jinja/methods.hpp"
#include "jinja/operators.hpp"
#include "jinja/unicode.hpp"

namespace kvzap::jinja::sequence_filters {
namespace {

constexpr Sequence::Shape iterator = Sequence::Shape::iterator;

Value length(Evaluator&, const Value& value, Arguments& arguments) {
  const Parameters given("length", arguments, {});
  if (value.is_undefined()) return std::int64_t{0};
  if (const Text* const text = value.text()) return text->length;
  if (const Dict* const dict = value.dict()) return static_cast<std::int64_t>(dict->items.size());
  if (Loop* const loop = value.loop()) return loop->length();
  if (value.sequence() == nullptr || value.is(iterator)) {
    throw Failure(fmt::format("a {} has no length", value.type_name()));
  }
  return static_cast<std::int64_t>(value.sequence()->values.size());
}

Value list(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("list", arguments, {});
  return evaluator.make_sequence(evaluator.elements_of(value));
}

Value first(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("first", arguments, {});
  if (value.is_string()) return evaluator.item(value, Value(std::int64_t{0}));
  const std::vector<Value> elements = evaluator.elements_of(value);
  return elements.empty() ? Value(Undefined{}) : elements.front();
}

Value last(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("last", arguments, {});
  if (value.is(iterator)) throw Failure("last: an iterator cannot be reversed");
  if (value.is_string()) return evaluator.item(value, Value(std::int64_t{-1}));
  const std::vector<Value> elements = evaluator.elements_of(value);
  return elements.empty() ? Value(Undefined{}) : elements.back();
}

Value reverse(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("reverse", arguments, {});
  if (value.is_string()) {
    return sliced(evaluator, value, Value(), Value(), Value(std::int64_t{-1}));
  }
  std::vector<Value> elements = evaluator.elements_of(value);
  std::reverse(elements.begin(), elements.end());
  return evaluator.make_sequence(std::move(elements),
                                 value.is(iterator) ? Sequence::Shape::list : iterator);
}

Value items(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("items", arguments, {});
  std::vector<Value> pairs;
  if (const Dict* const dict = value.dict()) {
    for (const auto& [key, element] : dict->items) {
      pairs.push_back(evaluator.make_sequence({key, element}, Sequence::Shape::tuple));
    }
  } else if (!value.is_undefined()) {
    throw Failure("items: expected a dict");
  }
  return evaluator.make_sequence(std::move(pairs), iterator);
}

Value join(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("join", arguments, {"d", "attribute"});
  const std::string separator = given[0] ? evaluator.text_of(*given[0]) : "";
  std::string result;
  bool is_first = true;
  for (const Value& element : evaluator.elements_of(value)) {
    if (!is_first) result += separator;
    is_first = false;
    evaluator.meter().allocate(separator.size());
    result += evaluator.text_of(attribute_of(evaluator, element, given[1]));
  }
  return evaluator.make_text(std::move(result));
}

Value sum(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("sum", arguments, {"attribute", "start"});
  Value total = given[1] ? *given[1] : Value(std::int64_t{0});
  if (total.is_string()) throw Failure("sum: the start must not be a string");
  for (const Value& element : evaluator.elements_of(value)) {
    total = arithmetic(evaluator, Operator::add, total, attribute_of(evaluator, element, given[0]));
  }
  return total;
}

// ---- Order --------------------------------------------------------------------------------------

Value without_case(Evaluator& evaluator, const Value& value, bool is_case_sensitive) {
  if (is_case_sensitive || !value.is_string()) return value;
  return evaluator.make_text(lower(value.text()->bytes));
}

using Keyed = std::vector<std::pair<Value, Value>>;  // key, element

void sort_by_key(Evaluator& evaluator, Keyed& keyed, bool is_reversed) {
  evaluator.meter().allocate(keyed.size() * 2 * sizeof(Value));
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    return is_reversed ? order_of(b.first, a.first, evaluator.meter()) == -1
                       : order_of(a.first, b.first, evaluator.meter()) == -1;
  });
}

std::vector<Value> elements_in(const Keyed& keyed) {
  std::vector<Value> elements;
  for (const auto& item : keyed) elements.push_back(item.second);
  return elements;
}

Value dictsort(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("dictsort", arguments, {"case_sensitive", "by", "reverse"});
  const std::string_view by = given.text_or(1, "key");
  if (by != "key" && by != "value") throw Failure("dictsort: sort by key or by value");
  if (value.dict() == nullptr) throw Failure("dictsort: expected a dict");
  Keyed keyed;
  for (const auto& [key, element] : value.dict()->items) {
    keyed.emplace_back(without_case(evaluator, by == "key" ? key : element, given.flag(0)),
                       evaluator.make_sequence({key, element}, Sequence::Shape::tuple));
  }
  sort_by_key(evaluator, keyed, given.flag(2));
  return evaluator.make_sequence(elements_in(keyed));
}

/// Returns the keys of sort's attribute, which may name several with commas between them.
Value sort_key(Evaluator& evaluator, const Value& value, const Value* attribute,
               bool is_case_sensitive) {
  if (attribute == nullptr || !attribute->is_string()) {
    return evaluator.make_sequence(
        {without_case(evaluator, attribute_of(evaluator, value, attribute), is_case_sensitive)});
  }
  std::vector<Value> keys;
  std::string_view rest = attribute->text()->bytes;
  for (;;) {
    const std::size_t end = std::min(rest.find(','), rest.size());
    const Value name = evaluator.make_text(std::string(rest.substr(0, end)));
    keys.push_back(
        without_case(evaluator, attribute_of(evaluator, value, &name), is_case_sensitive));
    if (end == rest.size()) break;
    rest.remove_prefix(end + 1);
  }
  return evaluator.make_sequence(std::move(keys));
}

Value sort(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("sort", arguments, {"reverse", "case_sensitive", "attribute"});
  Keyed keyed;
  for (const Value& element : evaluator.elements_of(value)) {
    keyed.emplace_back(sort_key(evaluator, element, given[2], given.flag(1)), element);
  }
  sort_by_key(evaluator, keyed, given.flag(0));
  return evaluator.make_sequence(elements_in(keyed));
}

Value unique(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("unique", arguments, {"case_sensitive", "attribute"});
  std::vector<std::pair<Value, Value>> seen;
  for (const Value& element : evaluator.elements_of(value)) {
    Value key = without_case(evaluator, attribute_of(evaluator, element, given[1]), given.flag(0));
    require_hashable(key, evaluator.meter());
    const bool is_new = std::none_of(seen.begin(), seen.end(), [&](const auto& other) {
      return are_equal(other.first, key, evaluator.meter());
    });
    if (is_new) seen.emplace_back(std::move(key), element);
  }
  return evaluator.make_sequence(elements_in(seen), iterator);
}

template <int order>
Value extreme(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("min or max", arguments, {"case_sensitive", "attribute"});
  Value best_key, best = Undefined{};
  bool is_first = true;
  for (const Value& element : evaluator.elements_of(value)) {
    Value key = without_case(evaluator, attribute_of(evaluator, element, given[1]), given.flag(0));
    if (is_first || order_of(key, best_key, evaluator.meter()) == order) {
      best_key = std::move(key);
      best = element;
    }
    is_first = false;
  }
  return best;
}

Value groupby(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("groupby", arguments, {"attribute", "default", "case_sensitive"}, 1);
  const auto key_of = [&](const Value& element) {
    return attribute_of(evaluator, element, given[0], given[1]);
  };
  Keyed keyed;
  for (const Value& element : evaluator.elements_of(value)) {
    keyed.emplace_back(without_case(evaluator, key_of(element), given.flag(2)), element);
  }
  sort_by_key(evaluator, keyed, false);
  std::vector<Value> groups;
  for (std::size_t begin = 0, end = 0; begin < keyed.size(); begin = end) {
    std::vector<Value> members;
    while (end < keyed.size() &&
           are_equal(keyed[begin].first, keyed[end].first, evaluator.meter())) {
      members.push_back(keyed[end++].second);
    }
    if (end == begin) members.push_back(keyed[end++].second);  // NaN differs from itself
    Value grouper = key_of(members.front());
    groups.push_back(evaluator.make_sequence(
        {std::move(grouper), evaluator.make_sequence(std::move(members))}, Sequence::Shape::group));
  }
  return evaluator.make_sequence(std::move(groups));
}

// ---- Elements -----------------------------------------------------------------------------------

Value batch(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("batch", arguments, {"linecount", "fill_with"}, 1);
  const std::int64_t size = given.integer_or(0, 1);
  if (size < 1 || size > 100000) throw Failure("batch: the size is out of range");
  const auto count = static_cast<std::size_t>(size);
  std::vector<Value> batches, open;
  const auto close = [&] { batches.push_back(evaluator.make_sequence(std::exchange(open, {}))); };
  for (const Value& element : evaluator.elements_of(value)) {
    if (open.size() == count) close();
    open.push_back(element);
  }
  if (!open.empty()) {
    if (given[1] && !given[1]->is_none()) open.resize(count, *given[1]);
    close();
  }
  return evaluator.make_sequence(std::move(batches), iterator);
}

/// Returns the arguments after the first `count` without names.
Arguments arguments_behind(const Arguments& arguments, std::size_t count) {
  Arguments rest = arguments;
  const auto begin = rest.positional.begin();
  const std::size_t size = std::min(count, rest.positional.size());
  rest.positional.erase(begin, begin + static_cast<std::ptrdiff_t>(size));
  return rest;
}

std::string_view name_at(const Arguments& arguments, std::size_t index, std::string_view filter) {
  if (index >= arguments.positional.size() || !arguments.positional[index].is_string()) {
    throw Failure(fmt::format("{}: expected the name of a filter, test or attribute", filter));
  }
  return arguments.positional[index].text()->bytes;
}

Value map(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  std::vector<Value> results;
  if (!is_true(value)) return evaluator.make_sequence({}, iterator);
  const bool has_attribute =
      arguments.positional.empty() &&
      std::any_of(arguments.named.begin(), arguments.named.end(),
                  [](const auto& argument) { return argument.first == "attribute"; });
  if (has_attribute) {
    const Parameters given("map", arguments, {"attribute", "default"});
    for (const Value& element : evaluator.elements_of(value)) {
      results.push_back(attribute_of(evaluator, element, given[0], given[1]));
    }
  } else {
    const std::string_view name = name_at(arguments, 0, "map");
    const Arguments rest = arguments_behind(arguments, 1);
    for (const Value& element : evaluator.elements_of(value)) {
      Arguments given = rest;
      results.push_back(evaluator.filtered(name, element, given));
    }
  }
  return evaluator.make_sequence(std::move(results), iterator);
}

/// select, reject, selectattr and rejectattr.
template <bool selects, bool by_attribute>
Value selection(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  if (!is_true(value)) return evaluator.make_sequence({}, iterator);
  constexpr std::size_t skipped = by_attribute ? 1 : 0;
  const Value* attribute = nullptr;
  if (by_attribute) {
    if (arguments.positional.empty()) throw Failure("selectattr: expected an attribute");
    attribute = &arguments.positional.front();
  }
  const bool has_test = arguments.positional.size() > skipped;
  const std::string_view name = has_test ? name_at(arguments, skipped, "select") : "";
  const Arguments rest = arguments_behind(arguments, skipped + 1);
  std::vector<Value> results;
  for (const Value& element : evaluator.elements_of(value)) {
    const Value tested = attribute_of(evaluator, element, attribute);
    Arguments given = rest;
    const bool holds = has_test ? evaluator.tested(name, tested, given) : is_true(tested);
    if (holds == selects) results.push_back(element);
  }
  return evaluator.make_sequence(std::move(results), iterator);
}

constexpr std::pair<std::string_view, Function> table[] = {
    {"length", length},
    {"count", length},
    {"list", list},
    {"first", first},
    {"last", last},
    {"reverse", reverse},
    {"items", items},
    {"join", join},
    {"sum", sum},
    {"dictsort", dictsort},
    {"sort", sort},
    {"unique", unique},
    {"min", extreme<-1>},
    {"max", extreme<1>},
    {"groupby", groupby},
    {"batch", batch},
    {"map", map},
    {"select", selection<true, false>},
    {"reject", selection<false, false>},
    {"selectattr", selection<true, true>},
    {"rejectattr", selection<false, true>},
};

}  // namespace
}  // namespace kvzap::jinja::sequence_filters

namespace kvzap::jinja {

Function find_sequence_filter(std::string_view name) {
  return find_in(sequence_filters::table, name);
}

}  // namespace kvzap::jinja
