// Tests: `value is test`.
#include <cmath>

#include "jinja/filters.hpp"
#include "jinja/methods.hpp"
#include "jinja/operators.hpp"

namespace kvzap::jinja::tests {
namespace {

using Shape = Sequence::Shape;

template <bool (*holds)(const Value&)>
bool plain(Evaluator&, const Value& value, Arguments& arguments) {
  const Parameters given("a test", arguments, {});
  return holds(value);
}

bool is_defined(const Value& value) { return !value.is_undefined(); }
bool is_undefined(const Value& value) { return value.is_undefined(); }
bool is_none(const Value& value) { return value.is_none(); }
bool is_boolean(const Value& value) { return value.boolean() != nullptr; }
bool is_true_object(const Value& value) { return value.boolean() && *value.boolean(); }
bool is_false_object(const Value& value) { return value.boolean() && !*value.boolean(); }
bool is_string(const Value& value) { return value.is_string(); }
bool is_number(const Value& value) { return as_float(value).has_value(); }
bool is_integer(const Value& value) { return value.integer() != nullptr; }
bool is_float(const Value& value) { return value.floating() != nullptr; }
bool is_mapping(const Value& value) { return value.dict() != nullptr; }
bool is_iterable(const Value& value) {
  return value.is_undefined() || value.is_string() || value.sequence() || value.dict() ||
         value.loop();
}
bool is_sequence(const Value& value) {
  const Sequence* const sequence = value.sequence();
  return value.is_undefined() || value.is_string() || value.dict() ||
         (sequence && sequence->shape <= Shape::range);
}
bool is_callable(const Value& value) {
  return value.is_undefined() || value.callable() || value.loop();
}
bool is_escaped(const Value& value) { return value.text() && value.text()->is_safe; }

template <bool upper_case>
bool is_case(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("upper or lower", arguments, {});
  return has_case(evaluator.text_of(value), upper_case);
}

template <Operator operation>
bool compares(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("a comparison", arguments, {"b"}, 1);
  return holds(evaluator, operation, value, *given[0]);
}

bool leaves(Evaluator& evaluator, const Value& value, const Value& divisor, std::int64_t rest) {
  const Value found = arithmetic(evaluator, Operator::modulo, value, divisor);
  return are_equal(found, Value(rest), evaluator.meter());
}

template <std::int64_t rest>
bool is_parity(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("odd or even", arguments, {});
  return leaves(evaluator, value, Value(std::int64_t{2}), rest);
}

bool is_divisible(Evaluator& evaluator, const Value& value, Arguments& arguments) {
  const Parameters given("divisibleby", arguments, {"num"}, 1);
  return leaves(evaluator, value, *given[0], 0);
}

bool is_same(Evaluator&, const Value& value, Arguments& arguments) {
  const Parameters given("sameas", arguments, {"other"}, 1);
  return are_same(value, *given[0]);
}

bool is_filter(Evaluator&, const Value& value, Arguments& arguments) {
  const Parameters given("filter", arguments, {});
  return value.is_string() && find_filter(value.text()->bytes) != nullptr;
}

bool is_test(Evaluator&, const Value& value, Arguments& arguments) {
  const Parameters given("test", arguments, {});
  return value.is_string() && find_test(value.text()->bytes) != nullptr;
}

constexpr std::pair<std::string_view, Test> table[] = {
    {"defined", plain<is_defined>},
    {"undefined", plain<is_undefined>},
    {"none", plain<is_none>},
    {"boolean", plain<is_boolean>},
    {"true", plain<is_true_object>},
    {"false", plain<is_false_object>},
    {"string", plain<is_string>},
    {"number", plain<is_number>},
    {"integer", plain<is_integer>},
    {"float", plain<is_float>},
    {"mapping", plain<is_mapping>},
    {"iterable", plain<is_iterable>},
    {"sequence", plain<is_sequence>},
    {"callable", plain<is_callable>},
    {"escaped", plain<is_escaped>},
    {"lower", is_case<false>},
    {"upper", is_case<true>},
    {"odd", is_parity<1>},
    {"even", is_parity<0>},
    {"divisibleby", is_divisible},
    {"sameas", is_same},
    {"filter", is_filter},
    {"test", is_test},
    {"in", compares<Operator::in>},
    {"==", compares<Operator::equal>},
    {"eq", compares<Operator::equal>},
    {"equalto", compares<Operator::equal>},
    {"!=", compares<Operator::not_equal>},
    {"ne", compares<Operator::not_equal>},
    {"<", compares<Operator::less>},
    {"lt", compares<Operator::less>},
    {"lessthan", compares<Operator::less>},
    {"<=", compares<Operator::less_equal>},
    {"le", compares<Operator::less_equal>},
    {">", compares<Operator::greater>},
    {"gt", compares<Operator::greater>},
    {"greaterthan", compares<Operator::greater>},
    {">=", compares<Operator::greater_equal>},
    {"ge", compares<Operator::greater_equal>},
};

}  // namespace
}  // namespace kvzap::jinja::tests

namespace kvzap::jinja {

Test find_test(std::string_view name) { return find_in(tests::table, name); }

}  // namespace kvzap::jinja
