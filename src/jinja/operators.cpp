#include "jinja/operators.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "jinja/formatting.hpp"
#include "jinja/markup.hpp"
#include "jinja/methods.hpp"
#include "jinja/unicode.hpp"

namespace kvzap::jinja {
namespace {

constexpr std::string_view symbols[] = {
    "+", "-", "*", "/", "//", "%", "**", "==", "!=", "<", "<=", ">", ">=", "in", "not in"};

[[noreturn]] void fail_types(Operator operation, const Value& a, const Value& b) {
  if (const Undefined* const undefined = a.is_undefined() ? a.undefined() : b.undefined()) {
    throw Failure(fmt::format("'{}' is undefined", undefined->name));
  }
  throw Failure(fmt::format("{} {} {} is not defined", a.type_name(),
                            symbols[static_cast<std::size_t>(operation)], b.type_name()));
}

/// Calls an operation of the compiler that returns whether the result overflows.
template <class Operation>
std::int64_t checked(const Operation& operation) {
  std::int64_t result = 0;
  if (operation(result)) throw Failure("an integer exceeds 64 bits");
  return result;
}

std::int64_t multiplied(std::int64_t a, std::int64_t b) {
  return checked([&](std::int64_t& result) { return __builtin_mul_overflow(a, b, &result); });
}

std::int64_t floor_divided(std::int64_t a, std::int64_t b) {
  if (b == -1) return checked([&](std::int64_t& r) { return __builtin_sub_overflow(0, a, &r); });
  const std::int64_t quotient = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

std::int64_t powered(std::int64_t base, std::int64_t exponent) {
  std::int64_t result = 1;
  while (exponent > 0) {
    if (exponent % 2 == 1) result = multiplied(result, base);
    exponent /= 2;
    if (exponent > 0) base = multiplied(base, base);
  }
  return result;
}

Value of_integers(Operator operation, std::int64_t a, std::int64_t b) {
  const bool divides = operation == Operator::divide || operation == Operator::floor_divide ||
                       operation == Operator::modulo;
  if (divides && b == 0) throw Failure("division by zero");
  switch (operation) {
    case Operator::add:
      return checked([&](std::int64_t& r) { return __builtin_add_overflow(a, b, &r); });
    case Operator::subtract:
      return checked([&](std::int64_t& r) { return __builtin_sub_overflow(a, b, &r); });
    case Operator::multiply:
      return multiplied(a, b);
    case Operator::divide:
      return static_cast<double>(a) / static_cast<double>(b);
    case Operator::floor_divide:
      return floor_divided(a, b);
    case Operator::modulo:
      return b == -1 ? std::int64_t{0} : a - floor_divided(a, b) * b;
    default:
      break;
  }
  if (b >= 0) return powered(a, b);
  if (a == 0) throw Failure("division by zero");
  return std::pow(static_cast<double>(a), static_cast<double>(b));
}

Value of_floats(Operator operation, double a, double b) {
  const bool divides = operation == Operator::divide || operation == Operator::floor_divide ||
                       operation == Operator::modulo;
  if (divides && b == 0) throw Failure("division by zero");
  double rest = divides ? std::fmod(a, b) : 0;
  if (rest != 0 && (b < 0) != (rest < 0)) rest += b;
  switch (operation) {
    case Operator::add:
      return a + b;
    case Operator::subtract:
      return a - b;
    case Operator::multiply:
      return a * b;
    case Operator::divide:
      return a / b;
    case Operator::floor_divide: {
      const double quotient = (a - rest) / b;
      const double floor = std::floor(quotient);
      return quotient == 0 ? std::copysign(0.0, a / b) : quotient - floor > 0.5 ? floor + 1 : floor;
    }
    case Operator::modulo:
      return rest == 0 ? std::copysign(0.0, b) : rest;
    default:
      break;
  }
  if (a == 0 && b < 0) throw Failure("division by zero");
  const double power = std::pow(a, b);
  const bool is_finite = std::isfinite(a) && std::isfinite(b);
  if (is_finite && !std::isfinite(power)) throw Failure("a power has no finite real value");
  return power;
}

Value repeated(Evaluator& evaluator, const Value& value, std::int64_t times) {
  times = std::max<std::int64_t>(times, 0);
  constexpr std::int64_t most = 1 << 30;
  const auto check = [&](std::size_t size) {
    if (size > 0 && times > most / static_cast<std::int64_t>(size)) {
      throw Failure("a repeated value takes too much memory");
    }
    evaluator.meter().allocate(size * static_cast<std::size_t>(times));
  };
  if (const Text* const text = value.text()) {
    check(text->bytes.size());
    std::string result;
    if (text->bytes.empty()) times = 0;
    for (std::int64_t i = 0; i < times; ++i) result += text->bytes;
    return make_like(evaluator, value, std::move(result));
  }
  const Sequence& sequence = *value.sequence();
  check(sequence.values.size() * sizeof(Value));
  std::vector<Value> values;
  if (sequence.values.empty()) times = 0;
  for (std::int64_t i = 0; i < times; ++i) {
    values.insert(values.end(), sequence.values.begin(), sequence.values.end());
  }
  return evaluator.make_sequence(std::move(values), sequence.shape);
}

bool is_list_or_tuple(const Value& value) {
  return value.sequence() != nullptr && value.sequence()->shape <= Sequence::Shape::tuple;
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
    return evaluator.make_safe(std::move(text));
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
    return make_like(evaluator, a, percent_formatted(evaluator, a.text()->bytes, b, is_safe(a)));
  }
  fail_types(operation, a, b);
}

Value negated(const Value& value) {
  if (const double* const number = value.floating()) return -*number;
  const auto integer = as_integer(value);
  if (!integer) throw Failure(fmt::format("a {} cannot be negated", value.type_name()));
  return checked([&](std::int64_t& r) { return __builtin_sub_overflow(0, *integer, &r); });
}

bool holds(Evaluator& evaluator, Operator operation, const Value& a, const Value& b) {
  switch (operation) {
    case Operator::equal:
      return are_equal(a, b, evaluator.meter());
    case Operator::not_equal:
      return !are_equal(a, b, evaluator.meter());
    case Operator::in:
      return evaluator.contains(b, a);
    case Operator::not_in:
      return !evaluator.contains(b, a);
    default:
      break;
  }
  if (a.is_undefined() || b.is_undefined()) fail_types(operation, a, b);
  const std::optional<int> order = order_of(a, b, evaluator.meter());
  if (!order) return false;
  switch (operation) {
    case Operator::less:
      return *order < 0;
    case Operator::less_equal:
      return *order <= 0;
    case Operator::greater:
      return *order > 0;
    default:
      return *order >= 0;
  }
}

namespace {

/// Positions of a Python slice whose limits are integers or none.
struct Positions {
  std::int64_t begin, end, step;

  Positions(const Value& first, const Value& last, const Value& stride, std::int64_t size) {
    step = as_integer(stride).value_or(1);
    if (step == 0) throw Failure("the step of a slice is 0");
    const std::int64_t low = step > 0 ? 0 : -1, high = step > 0 ? size : size - 1;
    const auto clipped = [&](std::int64_t place) {
      if (place < 0) place = place < -size ? low : place + size;
      return std::clamp(place, low, high);
    };
    begin = first.is_none() ? (step > 0 ? low : high) : clipped(as_integer(first).value_or(0));
    end = last.is_none() ? (step > 0 ? high : low) : clipped(as_integer(last).value_or(0));
  }

  template <class Visit>
  void each(const Visit& visit) const {
    for (std::int64_t i = begin; step > 0 ? i < end : i > end;) {
      visit(i);
      if (step > 0 ? step > end - i : step < end - i) break;
      i += step;
    }
  }
};

std::string sliced_text(const Text& text, const Positions& positions) {
  const std::string_view bytes = text.bytes;
  if (positions.step == 1) {
    const std::size_t begin = offset_of(bytes, positions.begin);
    const std::int64_t count = std::max<std::int64_t>(positions.end - positions.begin, 0);
    return std::string(bytes.substr(begin, offset_of(bytes.substr(begin), count)));
  }
  std::vector<std::uint32_t> offsets;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if ((static_cast<unsigned char>(bytes[i]) & 0xC0) != 0x80) {
      offsets.push_back(static_cast<std::uint32_t>(i));
    }
  }
  offsets.push_back(static_cast<std::uint32_t>(bytes.size()));
  std::string result;
  positions.each([&](std::int64_t i) {
    const auto place = static_cast<std::size_t>(i);
    result.append(bytes.substr(offsets[place], offsets[place + 1] - offsets[place]));
  });
  return result;
}

}  // namespace

Value sliced(Evaluator& evaluator, const Value& value, const Value& begin, const Value& end,
             const Value& step) {
  if (value.is_undefined()) {
    throw Failure(fmt::format("'{}' is undefined", value.undefined()->name));
  }
  for (const Value* const limit : {&begin, &end, &step}) {
    if (!limit->is_none() && !as_integer(*limit)) {
      throw Failure(
          fmt::format("the limits of a slice must be integers, found {}", limit->type_name()));
    }
  }
  if (const Text* const text = value.text()) {
    evaluator.meter().allocate(text->bytes.size() * (step.is_none() ? 1 : sizeof(std::uint32_t)));
    return make_like(evaluator, value,
                     sliced_text(*text, Positions(begin, end, step, text->length)));
  }
  const Sequence* const sequence = value.sequence();
  if (sequence == nullptr || sequence->shape > Sequence::Shape::range) {
    throw Failure(fmt::format("a {} cannot be sliced", value.type_name()));
  }
  std::vector<Value> values;
  Positions(begin, end, step, static_cast<std::int64_t>(sequence->values.size()))
      .each([&](std::int64_t i) {
        evaluator.meter().step();
        values.push_back(sequence->values[static_cast<std::size_t>(i)]);
      });
  const bool is_group = sequence->shape == Sequence::Shape::group;
  return evaluator.make_sequence(std::move(values),
                                 is_group ? Sequence::Shape::tuple : sequence->shape);
}

}  // namespace kvzap::jinja
