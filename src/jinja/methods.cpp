// Methods of lists, dicts and loops, and global functions.
#include <fmt/format.h>

#include <algorithm>
#include <ctime>

#include "files/c_locale.hpp"
#include "files/quote.hpp"
#include "jinja/evaluator.hpp"
#include "jinja/string_methods.hpp"

namespace kvzap::jinja::methods {
namespace {

// ---- Lists --------------------------------------------------------------------------------------

Value list_index(Call& c) {
  const auto& values = c.self.sequence()->values;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (are_equal(values[i], *c[0], c.meter)) return i;
  }
  c.fail("the list does not contain the value");
}

Value list_count(Call& c) {
  const auto& values = c.self.sequence()->values;
  return std::count_if(values.begin(), values.end(),
                       [&](const Value& value) { return are_equal(value, *c[0], c.meter); });
}

Value copy(Call& c) { return c.self; }  // values do not change

constexpr Builtin list_methods[] = {
    {"index", list_index, 1, {"_"}}, {"count", list_count, 1, {"_"}}, {"copy", copy}};

// ---- Dicts --------------------------------------------------------------------------------------

template <Sequence::Shape shape>
Value view(Call& c) {
  std::vector<Value> values;
  for (const auto& [key, value] : c.self.dict()->items) {
    values.push_back(shape == Sequence::Shape::items  ? c.evaluator.make_tuple({key, value})
                     : shape == Sequence::Shape::keys ? key
                                                      : value);
  }
  return c.evaluator.make_sequence(std::move(values), shape);
}

Value dict_get(Call& c) {
  const Value* const found = find(*c.self.dict(), *c[0], c.meter);
  return found ? *found : c[1] ? *c[1] : Value();
}

// transformers' sandbox refuses methods that change their object. They hide a dict's keys, as other
// methods do.
constexpr Builtin dict_methods[] = {{"items", view<Sequence::Shape::items>},
                                    {"keys", view<Sequence::Shape::keys>},
                                    {"values", view<Sequence::Shape::values>},
                                    {"get", dict_get, 1, {"_", "_"}},
                                    {"copy", copy},
                                    {"clear", nullptr},
                                    {"pop", nullptr},
                                    {"popitem", nullptr},
                                    {"setdefault", nullptr},
                                    {"update", nullptr},
                                    {"fromkeys", nullptr}};

// ---- Loops --------------------------------------------------------------------------------------

Value loop_cycle(Call& c) {
  const auto& values = c.arguments.positional;
  if (values.empty() || !c.arguments.named.empty()) c.fail("the call needs values");
  return values[static_cast<std::size_t>(c.self.loop()->index) % values.size()];
}

Value loop_changed(Call& c) {
  auto& compared = c.self.loop()->compared;
  const auto& values = c.arguments.positional;
  const auto are_same = [&](const Value& a, const Value& b) { return are_equal(a, b, c.meter); };
  const bool is_same = compared && std::equal(compared->begin(), compared->end(), values.begin(),
                                              values.end(), are_same);
  if (!is_same) compared = values;
  return !is_same;
}

constexpr Builtin loop_methods[] = {{"cycle", loop_cycle, 0, {"*"}},
                                    {"changed", loop_changed, 0, {"*"}}};

// ---- Globals ------------------------------------------------------------------------------------

Value range(Call& c) {
  const std::int64_t first = c[1] ? c.integer(0) : 0;
  const std::int64_t last = c.integer(c[1] ? 1 : 0);
  const std::int64_t step = c.integer(2, 1);
  if (step == 0) c.fail("the step is 0");
  constexpr std::size_t most = 100000;  // as in Jinja2's sandbox
  std::vector<Value> values;
  for (std::int64_t i = first; step > 0 ? i < last : i > last;) {
    if (values.size() == most) c.fail("more than 100000 values");
    values.emplace_back(i);
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  return c.evaluator.make_sequence(std::move(values), Sequence::Shape::range);
}

/// Returns the items of dict(…): those of a dict or of pairs, then named ones.
std::vector<std::pair<Value, Value>> items_of(Call& c) {
  std::vector<std::pair<Value, Value>> items;
  const auto& [positional, named] = c.arguments;
  if (positional.size() > 1) c.fail("takes at most 1 argument without a name");
  if (!positional.empty() && positional[0].dict()) {
    items = positional[0].dict()->items;
  } else if (!positional.empty()) {
    for (const Value& pair : c.evaluator.elements_of(positional[0])) {
      const std::vector<Value> two = c.evaluator.elements_of(pair);
      if (two.size() != 2) c.fail("expected pairs");
      c.evaluator.put(items, two[0], two[1]);
    }
  }
  for (const auto& [name, value] : named)
    c.evaluator.put(items, c.evaluator.make_text(name), value);
  return items;
}

Value dict(Call& c) { return c.evaluator.make_dict(items_of(c)); }

Value namespace_of(Call& c) {
  std::map<std::string, Value, std::less<>> attributes;
  for (const auto& [key, value] : items_of(c)) {
    if (!key.is_string()) continue;  // no template can read it
    require_public(key.text()->bytes);
    attributes[key.text()->bytes] = value;
  }
  return c.evaluator.make_namespace(std::move(attributes));
}

Value raise_exception(Call& c) {
  throw Failure(fmt::format("the template refuses the messages: {}",
                            files::shown(c.evaluator.text_of(*c[0]), 300)));
}

/// Returns one conversion of strftime() for the date of every rendering.
std::string date_part(char conversion) {
  constexpr std::string_view known = "faAbBcCdDeFGgHhIjklmMnpPrRStTuUVwWxXyYZz%";
  if (known.find(conversion) == known.npos) {
    throw Failure(fmt::format("strftime_now: unknown conversion %{}",
                              files::shown(std::string(1, conversion))));
  }
  constexpr std::time_t second = 1721952000;  // 26 July 2024
  std::tm date{};
  gmtime_r(&second, &date);
  if (conversion == 'f') return "000000";                 // microseconds
  if (conversion == 'Z' || conversion == 'z') return "";  // Python's time without a zone
  const char format[] = {'%', conversion, '\0'};
  char text[64];
  const files::CLocale english;  // names of days and months
  return {text, std::strftime(text, sizeof(text), format, &date)};
}

// The published templates of Llama 3 fall back to this date. A fixed one keeps a prompt the same
// from day to day, and with it the cached prefixes and snapshots.
Value strftime_now(Call& c) {
  const std::string_view format = c.text(0);
  c.meter.allocate(format.size() * 16);
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
  return c.evaluator.make_text(std::move(result));
}

constexpr Builtin globals[] = {{"range", range, 1, {"_", "_", "_"}},
                               {"dict", dict, 0, {"*"}},
                               {"namespace", namespace_of, 0, {"*"}},
                               {"raise_exception", raise_exception, 1, {"message"}},
                               {"strftime_now", strftime_now, 1, {"format"}}};

}  // namespace
}  // namespace kvzap::jinja::methods

namespace kvzap::jinja {

const Builtin* find_method(const Value& value, std::string_view name) {
  if (value.text()) return find_string_method(name);
  if (value.dict()) return find_in(methods::dict_methods, name);
  if (value.loop()) return find_in(methods::loop_methods, name);
  const bool is_list = value.sequence() && value.sequence()->has_items();
  return is_list ? find_in(methods::list_methods, name) : nullptr;
}

const Builtin* find_global(std::string_view name) { return find_in(methods::globals, name); }

}  // namespace kvzap::jinja
