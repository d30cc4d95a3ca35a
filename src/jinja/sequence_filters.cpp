// Filters of sequences and dicts.
#include <fmt/format.h>

#include <algorithm>

#include "jinja/evaluator.hpp"
#include "jinja/string_methods.hpp"
#include "jinja/unicode.hpp"

namespace kvzap::jinja::sequence_filters {
namespace {

constexpr Sequence::Shape iterator = Sequence::Shape::iterator;

std::vector<Value> elements(Call& c) { return c.evaluator.elements_of(c.self); }

Value length(Call& c) {
  if (c.self.is_undefined()) return 0;
  if (const Text* const text = c.self.text()) return text->length;
  if (const Dict* const dict = c.self.dict()) return dict->items.size();
  if (Loop* const loop = c.self.loop()) return loop->length();
  if (c.self.sequence() == nullptr || c.self.is(iterator)) {
    c.fail(fmt::format("a {} has no length", c.self.type_name()));
  }
  return c.self.sequence()->values.size();
}

Value list(Call& c) { return c.evaluator.make_sequence(elements(c)); }

template <bool is_last>
Value end(Call& c) {
  if (is_last && c.self.is(iterator)) c.fail("an iterator cannot be reversed");
  if (c.self.is_string()) return c.evaluator.item(c.self, is_last ? -1 : 0);
  const std::vector<Value> all = elements(c);
  return all.empty() ? Undefined{} : is_last ? all.back() : all.front();
}

Value reverse(Call& c) {
  if (c.self.is_string()) return sliced(c.evaluator, c.self, {}, {}, -1);
  std::vector<Value> all = elements(c);
  std::reverse(all.begin(), all.end());
  return c.evaluator.make_sequence(std::move(all),
                                   c.self.is(iterator) ? Sequence::Shape::list : iterator);
}

Value items(Call& c) {
  std::vector<Value> pairs;
  if (const Dict* const dict = c.self.dict()) {
    for (const auto& [key, value] : dict->items)
      pairs.push_back(c.evaluator.make_tuple({key, value}));
  } else if (!c.self.is_undefined()) {
    c.fail("expected a dict");
  }
  return c.evaluator.make_sequence(std::move(pairs), iterator);
}

Value join(Call& c) {
  const std::string separator = c[0] ? c.evaluator.text_of(*c[0]) : "";
  std::string result;
  bool is_first = true;
  for (const Value& element : elements(c)) {
    if (!std::exchange(is_first, false)) result += separator;
    c.meter.allocate(separator.size());
    result += c.evaluator.text_of(c.evaluator.attribute_of(element, c[1]));
  }
  return c.evaluator.make_text(std::move(result));
}

Value sum(Call& c) {
  Value total = c[1] ? *c[1] : 0;
  if (total.is_string()) c.fail("the start must not be a string");
  for (const Value& element : elements(c)) {
    const Value value = c.evaluator.attribute_of(element, c[0]);
    total = arithmetic(c.evaluator, Operator::add, total, value);
  }
  return total;
}

// ---- Order --------------------------------------------------------------------------------------

Value without_case(Call& c, const Value& value, bool is_case_sensitive) {
  if (is_case_sensitive || !value.is_string()) return value;
  return c.evaluator.make_text(lower(value.text()->bytes));
}

struct Keyed {
  Value key, element;
};

/// Returns the elements with the keys that arguments give: an attribute, and whether case counts.
std::vector<Keyed> keyed(Call& c, std::size_t attribute, std::size_t case_sensitive,
                         const Value* otherwise = nullptr) {
  std::vector<Keyed> result;
  for (const Value& element : elements(c)) {
    const Value key = c.evaluator.attribute_of(element, c[attribute], otherwise);
    result.push_back({without_case(c, key, c.flag(case_sensitive)), element});
  }
  return result;
}

void sort_by_key(Call& c, std::vector<Keyed>& all, bool is_reversed) {
  c.meter.allocate(all.size() * sizeof(Keyed));
  std::stable_sort(all.begin(), all.end(), [&](const Keyed& a, const Keyed& b) {
    return order_of(is_reversed ? b.key : a.key, is_reversed ? a.key : b.key, c.meter) == -1;
  });
}

Value elements_in(Call& c, const std::vector<Keyed>& all,
                  Sequence::Shape shape = Sequence::Shape::list) {
  std::vector<Value> result;
  for (const Keyed& each : all) result.push_back(each.element);
  return c.evaluator.make_sequence(std::move(result), shape);
}

Value dictsort(Call& c) {
  const std::string_view by = c.text(1, "key");
  if (by != "key" && by != "value") c.fail("sort by key or by value");
  if (c.self.dict() == nullptr) c.fail("expected a dict");
  std::vector<Keyed> all;
  for (const auto& [key, value] : c.self.dict()->items) {
    all.push_back({without_case(c, by == "key" ? key : value, c.flag(0)),
                   c.evaluator.make_tuple({key, value})});
  }
  sort_by_key(c, all, c.flag(2));
  return elements_in(c, all);
}

/// Returns the keys of sort's attribute, which may name several with commas between them.
Value sort_key(Call& c, const Value& value) {
  std::vector<Value> keys;
  const auto add = [&](const Value* attribute) {
    keys.push_back(without_case(c, c.evaluator.attribute_of(value, attribute), c.flag(1)));
  };
  if (c[2] == nullptr || !c[2]->is_string()) {
    add(c[2]);
  } else {
    for (const std::string_view name : pieces_of(c.text(2), ",", -1, false, c.meter)) {
      const Value attribute = c.evaluator.make_text(std::string(name));
      add(&attribute);
    }
  }
  return c.evaluator.make_sequence(std::move(keys));
}

Value sort(Call& c) {
  std::vector<Keyed> all;
  for (const Value& element : elements(c)) all.push_back({sort_key(c, element), element});
  sort_by_key(c, all, c.flag(0));
  return elements_in(c, all);
}

Value unique(Call& c) {
  std::vector<Keyed> seen;
  for (Keyed& each : keyed(c, 1, 0)) {
    require_hashable(each.key, c.meter);
    const bool is_new = std::none_of(seen.begin(), seen.end(), [&](const Keyed& other) {
      return are_equal(other.key, each.key, c.meter);
    });
    if (is_new) seen.push_back(std::move(each));
  }
  return elements_in(c, seen, iterator);
}

template <int order>
Value extreme(Call& c) {
  const std::vector<Keyed> all = keyed(c, 1, 0);
  const Keyed* best = nullptr;
  for (const Keyed& each : all) {
    if (best == nullptr || order_of(each.key, best->key, c.meter) == order) best = &each;
  }
  return best ? best->element : Undefined{};
}

Value groupby(Call& c) {
  std::vector<Keyed> all = keyed(c, 0, 2, c[1]);
  sort_by_key(c, all, false);
  std::vector<Value> groups;
  for (std::size_t begin = 0, end = 0; begin < all.size(); begin = end) {
    std::vector<Value> members;
    do {  // NaN differs from itself
      members.push_back(all[end++].element);
    } while (end < all.size() && are_equal(all[begin].key, all[end].key, c.meter));
    Value grouper = c.evaluator.attribute_of(members.front(), c[0], c[1]);
    groups.push_back(c.evaluator.make_sequence(
        {std::move(grouper), c.evaluator.make_sequence(std::move(members))},
        Sequence::Shape::group));
  }
  return c.evaluator.make_sequence(std::move(groups));
}

// ---- Elements -----------------------------------------------------------------------------------

Value batch(Call& c) {
  const std::int64_t size = c.integer(0);
  if (size < 1 || size > 100000) c.fail("the size is out of range");
  const auto count = static_cast<std::size_t>(size);
  std::vector<Value> batches, open;
  const auto close = [&] { batches.push_back(c.evaluator.make_sequence(std::exchange(open, {}))); };
  for (const Value& element : elements(c)) {
    if (open.size() == count) close();
    open.push_back(element);
  }
  if (!open.empty()) {
    if (c.has(1)) open.resize(count, *c[1]);
    close();
  }
  return c.evaluator.make_sequence(std::move(batches), iterator);
}

/// Takes the first argument without a name: the name of a filter or test.
std::string take_name(Call& c) {
  auto& positional = c.arguments.positional;
  if (positional.empty() || !positional.front().is_string()) {
    c.fail("expected the name of a filter, test or attribute");
  }
  std::string name = positional.front().text()->bytes;
  positional.erase(positional.begin());
  return name;
}

Value map(Call& c) {
  static constexpr Builtin by_attribute = {"map", nullptr, 0, {"attribute", "default"}};
  if (!is_true(c.self)) return c.evaluator.make_sequence({}, iterator);
  const auto& named = c.arguments.named;
  const bool has_attribute = c.arguments.positional.empty() &&
                             std::any_of(named.begin(), named.end(), [](const auto& argument) {
                               return argument.first == "attribute";
                             });
  std::vector<Value> results;
  if (has_attribute) {
    const Call given(c.evaluator, by_attribute, c.self, c.arguments);
    for (const Value& element : elements(c)) {
      results.push_back(c.evaluator.attribute_of(element, given[0], given[1]));
    }
  } else {
    const std::string name = take_name(c);
    const Builtin* const filter = find_filter(name);
    for (const Value& element : elements(c)) {
      Arguments arguments = c.arguments;
      results.push_back(c.evaluator.apply(filter, "filter", name, element, arguments));
    }
  }
  return c.evaluator.make_sequence(std::move(results), iterator);
}

/// select, reject, selectattr and rejectattr.
template <bool selects, bool by_attribute>
Value selection(Call& c) {
  if (!is_true(c.self)) return c.evaluator.make_sequence({}, iterator);
  auto& positional = c.arguments.positional;
  Value attribute;
  if (by_attribute) {
    if (positional.empty()) c.fail("expected an attribute");
    attribute = positional.front();
    positional.erase(positional.begin());
  }
  const bool has_test = !positional.empty();
  const std::string name = has_test ? take_name(c) : "";
  const Builtin* const test = find_test(name);
  std::vector<Value> results;
  for (const Value& element : elements(c)) {
    Value value = c.evaluator.attribute_of(element, &attribute);
    Arguments arguments = c.arguments;
    if (has_test) value = c.evaluator.apply(test, "test", name, value, arguments);
    if (is_true(value) == selects) results.push_back(element);
  }
  return c.evaluator.make_sequence(std::move(results), iterator);
}

constexpr Builtin table[] = {
    {"length", length},
    {"count", length},
    {"list", list},
    {"first", end<false>},
    {"last", end<true>},
    {"reverse", reverse},
    {"items", items},
    {"join", join, 0, {"d", "attribute"}},
    {"sum", sum, 0, {"attribute", "start"}},
    {"dictsort", dictsort, 0, {"case_sensitive", "by", "reverse"}},
    {"sort", sort, 0, {"reverse", "case_sensitive", "attribute"}},
    {"unique", unique, 0, {"case_sensitive", "attribute"}},
    {"min", extreme<-1>, 0, {"case_sensitive", "attribute"}},
    {"max", extreme<1>, 0, {"case_sensitive", "attribute"}},
    {"groupby", groupby, 1, {"attribute", "default", "case_sensitive"}},
    {"batch", batch, 1, {"linecount", "fill_with"}},
    {"map", map, 0, {"*"}},
    {"select", selection<true, false>, 0, {"*"}},
    {"reject", selection<false, false>, 0, {"*"}},
    {"selectattr", selection<true, true>, 0, {"*"}},
    {"rejectattr", selection<false, true>, 0, {"*"}},
};

}  // namespace
}  // namespace kvzap::jinja::sequence_filters

namespace kvzap::jinja {

const Builtin* find_sequence_filter(std::string_view name) {
  return find_in(sequence_filters::table, name);
}

}  // namespace kvzap::jinja
