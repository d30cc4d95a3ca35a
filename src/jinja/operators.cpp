// Python's operators.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "jinja/evaluator.hpp"
#include "jinja/printing.hpp"
#include "jinja/string_methods.hpp"
#include "jinja/unicode.hpp"

namespace kvzap::jinja {
namespace {

constexpr std::string_view symbols[] = {"or", "and", "+",  "-", "*",  "/", "//", "%",  "**",
                                        "~",  "==",  "!=", "<", "<=", ">", ">=", "in", "not in"};

[[noreturn]] void fail_types(Operator operation, const Value& a, const Value& b) {
  require_defined(a);
  require_defined(b);
  throw Failure(fmt::format("{} {} {} is not defined", a.type_name(),
                            symbols[static_cast<std::size_t>(operation)], b.type_name()));
}

/// `result`: where an operation of the compiler puts its result and returns whether it overflows.
std::int64_t in_64_bits(bool overflows, const std::int64_t& result) {
  if (overflows) throw Failure("an integer exceeds 64 bits");
  return result;
}

std::int64_t multiplied(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  return in_64_bits(__builtin_mul_overflow(a, b, &result), result);
}

std::int64_t floor_divided(std::int64_t a, std::int64_t b) {
  if (b == -1) return multiplied(a, b);
  const std::int64_t quotient = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

std::int64_t powered(std::int64_t base, std::int64_t exponent) {
  std::int64_t result = 1;
  for (; exponent > 0; exponent /= 2) {
    if (exponent % 2 == 1) result = multiplied(result, base);
    if (exponent > 1) base = multiplied(base, base);
  }
  return result;
}

Value of_floats(Operator operation, double a, double b) {
  const bool divides = operation >= Operator::divide && operation <= Operator::modulo;
  if ((divides && b == 0) || (operation == Operator::power && a == 0 && b < 0)) {
    throw Failure("division by zero");
  }
  double rest = divides ? std::fmod(a, b) : 0;
  if (rest != 0 && (b < 0) != (rest < 0)) rest += b;
  if (operation == Operator::add) return a + b;
  if (operation == Operator::subtract) return a - b;
  if (operation == Operator::multiply) return a * b;
  if (operation == Operator::divide) return a / b;
  if (operation == Operator::modulo) return rest == 0 ? std::copysign(0.0, b) : rest;
  if (operation == Operator::floor_divide) {
    const double quotient = (a - rest) / b, floor = std::floor(quotient);
    return quotient == 0 ? std::copysign(0.0, a / b) : quotient - floor > 0.5 ? floor + 1 : floor;
  }
  const double power = std::pow(a, b);
  const bool is_finite = std::isfinite(a) && std::isfinite(b);
  if (is_finite && !std::isfinite(power)) throw Failure("a power has no finite real value");
  return power;
}

Value of_integers(Operator operation, std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  if (operation == Operator::add) {
    return in_64_bits(__builtin_add_overflow(a, b, &result), result);
  }
  if (operation == Operator::subtract) {
    return in_64_bits(__builtin_sub_overflow(a, b, &result), result);
  }
  if (operation == Operator::multiply) return multiplied(a, b);
  if (operation == Operator::floor_divide && b != 0) return floor_divided(a, b);
  if (operation == Operator::modulo && b != 0) return b == -1 ? 0 : a - floor_divided(a, b) * b;
  if (operation == Operator::power && b >= 0) return powered(a, b);
  return of_floats(operation, static_cast<double>(a), static_cast<double>(b));
}

Value repeated(Evaluator& evaluator, const Value& value, std::int64_t times) {
  const Text* const text = value.text();
  times = std::max<std::int64_t>(times, 0);
  constexpr std::size_t most = 1 << 30;
  const std::size_t size =
      text ? text->bytes.size() : value.sequence()->values.size() * sizeof(Value);
  if (size > 0 && static_cast<std::size_t>(times) > most / size) {
    throw Failure("a repeated value takes too much memory");
  }
  evaluator.meter().allocate(size * static_cast<std::size_t>(times));
  const auto repeat = [&](const auto& elements, auto result) {
    for (std::int64_t i = 0; !elements.empty() && i < times; ++i) {
      result.insert(result.end(), elements.begin(), elements.end());
    }
    return result;
  };
  if (text) return evaluator.make_like(value, repeat(text->bytes, std::string()));
  const Sequence& sequence = *value.sequence();
  return evaluator.make_sequence(repeat(sequence.values, std::vector<Value>()), sequence.shape);
}

bool is_list_or_tuple(const Value& value) {
  return value.is(Sequence::Shape::list) || value.is(Sequence::Shape::tuple);
}

/// Returns the concatenation of two strings, lists or tuples.
std::optional<Value> joined(Evaluator& evaluator, const Value& a, const Value& b) {
  if (const Text* const first = a.text(), * const second = b.text(); first && second) {
    evaluator.meter().allocate(first->bytes.size() + second->bytes.size());
    if (first->is_safe == second->is_safe) {
      return Value(std::make_shared<const Text>(
          Text{first->bytes + second->bytes, first->length + second->length, first->is_safe}));
    }
    std::string text = first->is_safe ? first->bytes : escaped(first->bytes);
    text += second->is_safe ? second->bytes : escaped(second->bytes);
    return evaluator.make_text(std::move(text), true);
  }
  if (!is_list_or_tuple(a) || !is_list_or_tuple(b)) return std::nullopt;
  const Sequence &first = *a.sequence(), &second = *b.sequence();
  if (first.shape != second.shape) return std::nullopt;
  evaluator.meter().allocate((first.values.size() + second.values.size()) * sizeof(Value));
  std::vector<Value> values = first.values;
  values.insert(values.end(), second.values.begin(), second.values.end());
  return evaluator.make_sequence(std::move(values), first.shape);
}

}  // namespace

Value arithmetic(Evaluator& evaluator, Operator operation, const Value& a, const Value& b) {
  if (operation == Operator::concatenate) {
    return evaluator.make_text(evaluator.text_of(a) + evaluator.text_of(b));
  }
  const auto x = as_integer(a), y = as_integer(b);
  if (x && y) return of_integers(operation, *x, *y);
  const auto u = as_float(a), v = as_float(b);
  if (u && v) return of_floats(operation, *u, *v);
  if (operation == Operator::add) {
    if (auto result = joined(evaluator, a, b)) return *result;
  } else if (operation == Operator::multiply) {
    if (y && (a.is_string() || is_list_or_tuple(a))) return repeated(evaluator, a, *y);
    if (x && (b.is_string() || is_list_or_tuple(b))) return repeated(evaluator, b, *x);
  } else if (operation == Operator::modulo && a.is_string()) {
    return evaluator.make_like(a, percent_formatted(evaluator, a.text()->bytes, b, is_safe(a)));
  }
  fail_types(operation, a, b);
}

Value negated(const Value& value) {
  if (const double* const number = value.floating()) return -*number;
  if (const auto integer = as_integer(value)) return multiplied(*integer, -1);
  throw Failure(fmt::format("a {} cannot be negated", value.type_name()));
}

bool holds(Evaluator& evaluator, Operator operation, const Value& a, const Value& b) {
  if (operation == Operator::equal || operation == Operator::not_equal) {
    return are_equal(a, b, evaluator.meter()) == (operation == Operator::equal);
  }
  if (operation == Operator::in || operation == Operator::not_in) {
    return evaluator.contains(b, a) == (operation == Operator::in);
  }
  if (a.is_undefined() || b.is_undefined()) fail_types(operation, a, b);
  const std::optional<int> order = order_of(a, b, evaluator.meter());
  if (!order) return false;
  return operation == Operator::less         ? *order < 0
         : operation == Operator::less_equal ? *order <= 0
         : operation == Operator::greater    ? *order > 0
                                             : *order >= 0;
}

Value sliced(Evaluator& evaluator, const Value& value, const Value& first, const Value& last,
             const Value& stride) {
  require_defined(value);
  for (const Value* const limit : {&first, &last, &stride}) {
    if (!limit->is_none() && !as_integer(*limit)) {
      throw Failure(
          fmt::format("the limits of a slice must be integers, found {}", limit->type_name()));
    }
  }
  const Text* const text = value.text();
  const Sequence* const sequence = value.sequence();
  if (text == nullptr && (sequence == nullptr || !sequence->has_items())) {
    throw Failure(fmt::format("a {} cannot be sliced", value.type_name()));
  }
  const std::int64_t size =
      text ? text->length : static_cast<std::int64_t>(sequence->values.size());
  const std::int64_t step = as_integer(stride).value_or(1);
  if (step == 0) throw Failure("the step of a slice is 0");
  const std::int64_t low = step > 0 ? 0 : -1, high = step > 0 ? size : size - 1;
  const auto place_of = [&](const Value& limit, std::int64_t otherwise) {
    std::int64_t place = as_integer(limit).value_or(otherwise);
    if (place < 0 && !limit.is_none()) place = place < -size ? low : place + size;
    return std::clamp(place, low, high);
  };
  const std::int64_t begin = place_of(first, step > 0 ? low : high);
  const std::int64_t end = place_of(last, step > 0 ? high : low);
  if (text && step == 1) {
    evaluator.meter().allocate(text->bytes.size());
    const std::string_view rest =
        std::string_view(text->bytes).substr(offset_of(text->bytes, begin));
    const std::size_t bytes = offset_of(rest, std::max<std::int64_t>(end - begin, 0));
    return evaluator.make_like(value, std::string(rest.substr(0, bytes)));
  }
  const std::vector<Value> elements = evaluator.elements_of(value);
  std::vector<Value> values;
  std::string characters;
  for (std::int64_t i = begin; step > 0 ? i < end : i > end; i += step) {
    evaluator.meter().step();
    const Value& element = elements[static_cast<std::size_t>(i)];
    text ? void(characters += element.text()->bytes) : values.push_back(element);
    if (step > 0 ? step > end - i : step < end - i) break;
  }
  if (text) return evaluator.make_like(value, std::move(characters));
  const bool is_group = value.is(Sequence::Shape::group);
  return evaluator.make_sequence(std::move(values),
                                 is_group ? Sequence::Shape::tuple : sequence->shape);
}

}  // namespace kvzap::jinja
