// A parsed template: functions that the evaluator runs. There is no syntax tree.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "jinja/value.hpp"

namespace kvzap::jinja {

/// An expression. An absent one has no function.
struct Expression {
  std::function<Value(Evaluator&)> run;
  int line = 0;
  int depth = 0;  // of nesting
  bool is_call = false;
};

struct Statement {
  int line;
  std::function<void(Evaluator&)> run;
};
using Body = std::vector<Statement>;

enum class Operator {
  either,
  both,
  add,
  subtract,
  multiply,
  divide,
  floor_divide,
  modulo,
  power,
  concatenate,
  equal,
  not_equal,
  less,
  less_equal,
  greater,
  greater_equal,
  in,
  not_in
};

struct ArgumentList {
  std::vector<Expression> positional;
  std::vector<std::pair<std::string, Expression>> named;
  Expression more_positional;  // *sequence
  Expression more_named;       // **dict
};

/// A target of an assignment: a name, an attribute of a namespace, or targets in a tuple.
struct Target {
  std::string name;
  std::string attribute;
  std::vector<Target> elements;
  bool is_tuple = false;
};

/// A macro, or the body of a call block.
struct Macro {
  std::string name;
  std::vector<std::pair<std::string, Expression>> parameters;  // with their defaults
  Body body;
  bool uses_caller = false;
  bool uses_varargs = false;
  bool uses_kwargs = false;
};

struct LoopBlock {
  Target target;
  Expression iterable, filter;
  bool is_recursive = false;
  Body body, otherwise;
};

/// Why a template is no Jinja.
struct SyntaxFailure : Failure {
  SyntaxFailure(int where, const std::string& message) : Failure(message), line(where) {}
  int line;
};

/// Parses `source`, UTF-8. Throws SyntaxFailure.
Body parse(std::string_view source);

}  // namespace kvzap::jinja
