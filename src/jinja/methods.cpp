// Methods of lists, dicts and loops, and global functions.
#include "jinja/methods.hpp"

#include <fmt/format.h>

#include <ctime>
#include <string>

#include "files/c_locale.hpp"
#include "files/quote.hpp"
#include "jinja/unicode.hpp"

namespace kvzap::jinja::methods {
namespace {

// ---- Lists --------------------------------------------------------------------------------------

Value list_index(Evaluator& evaluator, const Value& self, Arguments& arguments) {
  const Parameters given("index", arguments, {""}, 1);
  const auto& values = self.sequence()->values;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (are_equal(values[i], *given[0], evaluator.meter())) return static_cast<std::int64_t>(i);
  }
  throw Failure("index: the list does not contain the value");
}

Value list_count(Evaluator& evaluator, const Value& self, Arguments& arguments) {
  const Parameters given("count", arguments, {""}, 1);
  std::int64_t number = 0;
  for (const Value& value : self.sequence()->values) {
    number += are_equal(value, *given[0], evaluator.meter()) ? 1 : 0;
  }
  return number;
}

Value copy(Evaluator&, const Value& self, Arguments& arguments) {
  const Parameters given("copy", arguments, {});
  return self;  // values do not change
}

constexpr std::pair<std::string_view, Function> list_methods[] = {
    {"index", list_index}, {"count", list_count}, {"copy", copy}};

// ---- Dicts --------------------------------------------------------------------------------------

template <Sequence::Shape shape>
Value view(Evaluator& evaluator, const Value& self, Arguments& arguments) {
  const Parameters given("items, keys or values", arguments, {});
  std::vector<Value> values;
  for (const auto& [key, value] : self.dict()->items) {
    if (shape == Sequence::Shape::items) {
      values.push_back(evaluator.make_sequence({key, value}, Sequence::Shape::tuple));
    } else {
      values.push_back(shape == Sequence::Shape::keys ? key : value);
    }
  }
  return evaluator.make_sequence(std::move(values), shape);
}

Value dict_get(Evaluator& evaluator, const Value& self, Arguments& arguments) {
  const Parameters given("get", arguments, {"", ""}, 1);
  const Value* const found = find(*self.dict(), *given[0], evaluator.meter());
  return found ? *found : given[1] ? *given[1] : Value();
}

constexpr std::pair<std::string_view, Function> dict_methods[] = {
    {"items", view<Sequence::Shape::items>},
    {"keys", view<Sequence::Shape::keys>},
    {"values", view<Sequence::Shape::values>},
    {"get", dict_get},
    {"copy", copy}};

// ---- Loops --------------------------------------------------------------------------------------

Value loop_cycle(Evaluator&, const Value& self, Arguments& arguments) {
  if (arguments.positional.empty() || !arguments.named.empty()) {
    throw Failure("loop.cycle needs values");
  }
  const auto size = static_cast<std::int64_t>(arguments.positional.size());
  return arguments.positional[static_cast<std::size_t>(self.loop()->index % size)];
}

Value loop_changed(Evaluator& evaluator, const Value& self, Arguments& arguments) {
  auto& compared = self.loop()->compared;
  bool is_same = compared && compared->size() == arguments.positional.size();
  for (std::size_t i = 0; is_same && i < compared->size(); ++i) {
    is_same = are_equal((*compared)[i], arguments.positional[i], evaluator.meter());
  }
  if (!is_same) compared = arguments.positional;
  return !is_same;
}

constexpr std::pair<std::string_view, Function> loop_methods[] = {{"cycle", loop_cycle},
                                                                  {"changed", loop_changed}};

// ---- Globals ------------------------------------------------------------------------------------

Value range(Evaluator& evaluator, const Value&, Arguments& arguments) {
  const Parameters given("range", arguments, {"", "", ""}, 1);
  const std::int64_t first = given[1] ? given.integer_or(0, 0) : 0;
  const std::int64_t last = given.integer_or(given[1] ? 1 : 0, 0);
  const std::int64_t step = given.integer_or(2, 1);
  if (step == 0) throw Failure("range: the step is 0");
  constexpr std::size_t most = 100000;  // as in Jinja2's sandbox
  std::vector<Value> values;
  for (std::int64_t i = first; step > 0 ? i < last : i > last;) {
    if (values.size() == most) throw Failure("range: more than 100000 values");
    values.emplace_back(i);
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  return evaluator.make_sequence(std::move(values), Sequence::Shape::range);
}

/// Returns the items of dict(…): those of a dict or of pairs, then named ones.
std::vector<std::pair<Value, Value>> items_of(Evaluator& evaluator, std::string_view function,
                                              const Arguments& arguments) {
  std::vector<std::pair<Value, Value>> items;
  if (arguments.positional.size() > 1) {
    throw Failure(fmt::format("{} takes at most 1 argument without a name", function));
  }
  for (const Value& source : arguments.positional) {
    if (source.dict()) {
      items = source.dict()->items;
      continue;
    }
    for (const Value& pair : evaluator.elements_of(source)) {
      const std::vector<Value> two = evaluator.elements_of(pair);
      if (two.size() != 2) throw Failure(fmt::format("{} needs pairs", function));
      evaluator.put(items, two[0], two[1]);
    }
  }
  for (const auto& [name, value] : arguments.named) {
    evaluator.put(items, evaluator.make_text(name), value);
  }
  return items;
}

Value dict(Evaluator& evaluator, const Value&, Arguments& arguments) {
  return evaluator.make_dict(items_of(evaluator, "dict", arguments));
}

Value namespace_of(Evaluator& evaluator, const Value&, Arguments& arguments) {
  std::map<std::string, Value, std::less<>> attributes;
  for (const auto& [key, value] : items_of(evaluator, "namespace", arguments)) {
    if (!key.is_string()) continue;  // no template can read it
    if (key.text()->bytes.substr(0, 1) == "_") {
      throw Failure("an attribute of a namespace must not begin with an underscore");
    }
    attributes[key.text()->bytes] = value;
  }
  return evaluator.make_namespace(std::move(attributes));
}

Value raise_exception(Evaluator& evaluator, const Value&, Arguments& arguments) {
  const Parameters given("raise_exception", arguments, {"message"}, 1);
  throw Failure(fmt::format("the template refuses the messages: {}",
                            files::shown(evaluator.text_of(*given[0]), 300)));
}

/// Returns one conversion of strftime() for the date of every rendering.
std::string date_part(char conversion) {
  constexpr std::string_view known = "faAbBcCdDeFGgHhIjklmMnpPrRStTuUVwWxXyYZz%";
  if (known.find(conversion) == known.npos) {
    throw Failure(fmt::format("strftime_now: unknown conversion %{}",
                              files::shown(std::string(1, conversion))));
  }
  std::tm date{};
  date.tm_year = 2024 - 1900;
  date.tm_mon = 6;
  date.tm_mday = 26;
  date.tm_wday = 5;
  date.tm_yday = 207;
  date.tm_isdst = 0;
  if (conversion == 'f') return "000000";                 // microseconds
  if (conversion == 'Z' || conversion == 'z') return "";  // Python's time without a zone
  const char format[] = {'%', conversion, '\0'};
  char text[64];
  const files::CLocale english;  // names of days and months
  return {text, std::strftime(text, sizeof(text), format, &date)};
}

// The published templates of Llama 3 fall back to this date. A fixed one keeps a prompt the same
// from day to day, and with it the cached prefixes and snapshots.
Value strftime_now(Evaluator& evaluator, const Value&, Arguments& arguments) {
  const Parameters given("strftime_now", arguments, {"format"}, 1);
  const std::string_view format = given.text(0);
  evaluator.meter().allocate(format.size() * 16);
  std::string result;
  for (std::size_t i = 0; i < format.size(); ++i) {
    if (format[i] != '%' || i + 1 == format.size()) {
      result += format[i];
      continue;
    }
    const bool is_short = format[i + 1] == '-' && i + 2 < format.size();
    i += is_short ? 2 : 1;
    std::string part = date_part(format[i]);
    if (is_short) part.erase(0, std::min(part.find_first_not_of('0'), part.size() - 1));
    result += part;
  }
  return evaluator.make_text(std::move(result));
}

constexpr std::pair<std::string_view, Function> globals[] = {{"range", range},
                                                             {"dict", dict},
                                                             {"namespace", namespace_of},
                                                             {"raise_exception", raise_exception},
                                                             {"strftime_now", strftime_now}};

}  // namespace
}  // namespace kvzap::jinja::methods

namespace kvzap::jinja {

Function find_method(const Value& value, std::string_view name) {
  if (value.text()) return find_string_method(name);
  if (value.dict()) return find_in(methods::dict_methods, name);
  if (value.loop()) return find_in(methods::loop_methods, name);
  const Sequence* const sequence = value.sequence();
  const bool is_list = sequence && sequence->shape <= Sequence::Shape::range;
  return is_list ? find_in(methods::list_methods, name) : nullptr;
}

Function find_global(std::string_view name) { return find_in(methods::globals, name); }

Value attribute_of(Evaluator& evaluator, const Value& value, const Value* attribute,
                   const Value* otherwise) {
  if (attribute == nullptr || attribute->is_none()) return value;
  const auto item = [&](const Value& object, const Value& key) {
    Value found = evaluator.item(object, key);
    const bool replaces = found.is_undefined() && otherwise != nullptr && !otherwise->is_none();
    return replaces ? *otherwise : found;
  };
  if (!attribute->is_string()) return item(value, *attribute);
  Value result = value;
  std::string_view rest = attribute->text()->bytes;
  for (;;) {
    evaluator.meter().step();
    const std::size_t end = std::min(rest.find('.'), rest.size());
    const std::string_view name = rest.substr(0, end);
    const bool is_number = !name.empty() && name.size() < 10 &&
                           name.find_first_not_of("0123456789") == std::string_view::npos;
    result = item(result, is_number ? Value(std::int64_t{std::stol(std::string(name))})
                                    : Value(std::string(name)));
    if (end == rest.size()) return result;
    rest.remove_prefix(end + 1);
  }
}

}  // namespace kvzap::jinja
