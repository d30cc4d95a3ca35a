// Parses expressions with Jinja's precedence.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "jinja/syntax.hpp"
#include "jinja/token_stream.hpp"

namespace kvzap::jinja {

class ExpressionParser {
 public:
  explicit ExpressionParser(TokenStream& stream) : m_stream(stream) {}

  /// An expression. Without `with_condition`, an `if` after it belongs to the statement.
  ExpressionPtr expression(bool with_condition = true);
  /// An expression, or several separated by commas: a tuple. `end`: a name that ends it.
  ExpressionPtr tuple(bool with_condition = true, std::string_view end = {},
                      bool may_be_empty = false);
  /// "name(arguments)|…", applied to `value`, which is null in a filter block.
  ExpressionPtr filter(ExpressionPtr value);
  ExpressionPtr filters(ExpressionPtr value);

  /// Nesting of the template at the place.
  int& depth() { return m_depth; }
  /// The macros that the place is in. Names of variables mark them.
  std::vector<Macro*>& macros() { return m_macros; }

  /// Filters and tests that do not exist. As in Jinja2, they are errors unless an `if` decides
  /// whether the template reaches them.
  struct Unknown {
    int line;
    std::string message;
  };
  std::vector<Unknown>& unknown() { return m_unknown; }
  const std::vector<Unknown>& unknown() const { return m_unknown; }

 private:
  using Kind = Expression::Kind;
  using Rule = ExpressionPtr (ExpressionParser::*)();

  ExpressionPtr make(Kind kind, int line, std::vector<ExpressionPtr> operands = {});
  template <class... Operands>
  ExpressionPtr made(Kind kind, int line, Operands... operands);
  ExpressionPtr finished(ExpressionPtr node);

  ExpressionPtr conditional();
  ExpressionPtr either();
  ExpressionPtr both();
  ExpressionPtr negation();
  ExpressionPtr compare();
  ExpressionPtr sum();
  ExpressionPtr concatenation();
  ExpressionPtr product();
  ExpressionPtr power();
  ExpressionPtr filtered_unary() { return unary(true); }
  ExpressionPtr unary(bool with_filter);
  ExpressionPtr primary();
  ExpressionPtr name();
  ExpressionPtr list();
  ExpressionPtr dict();
  ExpressionPtr postfix(ExpressionPtr node);
  ExpressionPtr attribute(ExpressionPtr node);
  ExpressionPtr subscript(ExpressionPtr node);
  ExpressionPtr slice(ExpressionPtr object, ExpressionPtr begin, int line);
  ExpressionPtr call(ExpressionPtr node);
  ExpressionPtr test(ExpressionPtr node);
  ExpressionPtr binary(Rule next, std::initializer_list<std::pair<std::string_view, Operator>> all);
  ArgumentList arguments();
  std::string dotted_name();

  TokenStream& m_stream;
  int m_depth = 0;
  std::vector<Macro*> m_macros;
  std::vector<Unknown> m_unknown;
};

}  // namespace kvzap::jinja
