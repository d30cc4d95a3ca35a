// Tests: `value is test`.
#include "jinja/evaluator.hpp"
#include "jinja/unicode.hpp"

namespace kvzap::jinja::tests {
namespace {

Value is_iterable(Call& c) {
  return c.self.is_undefined() || c.self.is_string() || c.self.sequence() || c.self.dict() ||
         c.self.loop();
}
Value is_sequence(Call& c) {
  return c.self.is_undefined() || c.self.is_string() || c.self.dict() ||
         (c.self.sequence() && c.self.sequence()->has_items());
}
Value is_callable(Call& c) { return c.self.is_undefined() || c.self.callable() || c.self.loop(); }

template <bool (*property)(std::string_view)>
Value has(Call& c) {
  return property(c.evaluator.text_of(c.self));
}

template <Operator operation>
Value compares(Call& c) {
  return holds(c.evaluator, operation, c.self, *c[0]);
}

Value leaves(Call& c, const Value& divisor, int rest) {
  return are_equal(arithmetic(c.evaluator, Operator::modulo, c.self, divisor), rest, c.meter);
}

Value is_filter(Call& c) { return c.self.is_string() && find_filter(c.self.text()->bytes); }
Value is_test(Call& c) { return c.self.is_string() && find_test(c.self.text()->bytes); }

constexpr Builtin table[] = {
    {"defined", [](Call& c) -> Value { return !c.self.is_undefined(); }},
    {"undefined", [](Call& c) -> Value { return c.self.is_undefined(); }},
    {"none", [](Call& c) -> Value { return c.self.is_none(); }},
    {"boolean", [](Call& c) -> Value { return c.self.boolean() != nullptr; }},
    {"true", [](Call& c) -> Value { return c.self.boolean() && *c.self.boolean(); }},
    {"false", [](Call& c) -> Value { return c.self.boolean() && !*c.self.boolean(); }},
    {"string", [](Call& c) -> Value { return c.self.is_string(); }},
    {"number", [](Call& c) -> Value { return as_float(c.self).has_value(); }},
    {"integer", [](Call& c) -> Value { return c.self.integer() != nullptr; }},
    {"float", [](Call& c) -> Value { return c.self.floating() != nullptr; }},
    {"mapping", [](Call& c) -> Value { return c.self.dict() != nullptr; }},
    {"iterable", is_iterable},
    {"sequence", is_sequence},
    {"callable", is_callable},
    {"escaped", [](Call& c) -> Value { return is_safe(c.self); }},
    {"lower", has<is_all_lower>},
    {"upper", has<is_all_upper>},
    {"odd", [](Call& c) { return leaves(c, 2, 1); }},
    {"even", [](Call& c) { return leaves(c, 2, 0); }},
    {"divisibleby", [](Call& c) { return leaves(c, *c[0], 0); }, 1, {"num"}},
    {"sameas", [](Call& c) -> Value { return c.self.is_same(*c[0]); }, 1, {"other"}},
    {"filter", is_filter},
    {"test", is_test},
    {"in", compares<Operator::in>, 1, {"b"}},
    {"==", compares<Operator::equal>, 1, {"b"}},
    {"eq", compares<Operator::equal>, 1, {"b"}},
    {"equalto", compares<Operator::equal>, 1, {"b"}},
    {"!=", compares<Operator::not_equal>, 1, {"b"}},
    {"ne", compares<Operator::not_equal>, 1, {"b"}},
    {"<", compares<Operator::less>, 1, {"b"}},
    {"lt", compares<Operator::less>, 1, {"b"}},
    {"lessthan", compares<Operator::less>, 1, {"b"}},
    {"<=", compares<Operator::less_equal>, 1, {"b"}},
    {"le", compares<Operator::less_equal>, 1, {"b"}},
    {">", compares<Operator::greater>, 1, {"b"}},
    {"gt", compares<Operator::greater>, 1, {"b"}},
    {"greaterthan", compares<Operator::greater>, 1, {"b"}},
    {">=", compares<Operator::greater_equal>, 1, {"b"}},
    {"ge", compares<Operator::greater_equal>, 1, {"b"}},
};

}  // namespace
}  // namespace kvzap::jinja::tests

namespace kvzap::jinja {

const Builtin* find_test(std::string_view name) { return find_in(tests::table, name); }

}  // namespace kvzap::jinja
