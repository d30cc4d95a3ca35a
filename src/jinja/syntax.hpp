// The syntax tree of a template.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "jinja/value.hpp"

namespace kvzap::jinja {

struct Expression;
struct Statement;
using ExpressionPtr = std::unique_ptr<Expression>;
using Body = std::vector<Statement>;

enum class Operator {
  add,
  subtract,
  multiply,
  divide,
  floor_divide,
  modulo,
  power,
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
  std::vector<ExpressionPtr> positional;
  std::vector<std::pair<std::string, ExpressionPtr>> named;
  ExpressionPtr more_positional;  // *sequence
  ExpressionPtr more_named;       // **dict
};

struct Expression {
  enum class Kind {
    constant,
    name,
    list,
    tuple,
    dict,         // operands: key, value, key, value, …
    conditional,  // operands: condition, value, other value or null
    either,
    both,
    negation,  // not
    compare,   // operands[0] operators[0] operands[1] operators[1] …
    arithmetic,
    minus,
    plus,
    concatenation,
    attribute,
    subscript,  // operands: object, key
    slice,      // operands: object, begin, end, step; absent ones are null
    call,       // operands: function
    filter,     // operands: value; null in a filter block
    test
  };

  Kind kind;
  int line;
  Value constant;
  std::string name;
  std::vector<ExpressionPtr> operands;
  std::vector<Operator> operators;
  ArgumentList arguments;
  int depth = 1;  // of the tree
};

/// A target of an assignment: a name, an attribute of a namespace, or targets in a tuple.
struct Target {
  std::string name;
  std::string attribute;
  std::vector<Target> elements;
  bool is_tuple = false;
};

struct Parameter {
  std::string name;
  ExpressionPtr otherwise;
};

/// A macro, or the body of a call block.
struct Macro {
  std::string name;
  std::vector<Parameter> parameters;
  Body body;
  bool uses_caller = false;
  bool uses_varargs = false;
  bool uses_kwargs = false;
};

struct Statement {
  enum class Kind {
    text,
    output,
    branch,  // values: conditions; bodies: one for each, and one for else
    loop,    // values: iterable, filter or null; bodies: body, else
    assignment,
    block_assignment,  // values: filter or null
    with,
    macro,
    call_block,  // values: call
    filter_block,
    scope,  // a body with variables of its own
    next,   // continue
    stop    // break
  };

  Kind kind;
  int line;
  std::string text;
  std::vector<ExpressionPtr> values;
  std::vector<Body> bodies;
  std::vector<Target> targets;
  std::unique_ptr<Macro> macro;
  bool is_recursive = false;
};

}  // namespace kvzap::jinja
