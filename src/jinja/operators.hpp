// Python's operators.
#pragma once

#include "jinja/evaluator.hpp"
#include "jinja/syntax.hpp"

namespace kvzap::jinja {

/// Returns `a operation b` for +, -, *, /, //, % and **. Throws Failure for other types and for
/// integers beyond 64 bits.
Value arithmetic(Evaluator& evaluator, Operator operation, const Value& a, const Value& b);
/// Returns -value.
Value negated(const Value& value);
/// Returns whether `a operation b` holds.
bool holds(Evaluator& evaluator, Operator operation, const Value& a, const Value& b);
/// Returns value[begin:end:step]; none stands for an absent limit. Throws Failure for values that
/// cannot be sliced.
Value sliced(Evaluator& evaluator, const Value& value, const Value& begin, const Value& end,
             const Value& step);

}  // namespace kvzap::jinja
