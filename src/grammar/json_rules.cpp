// JSON values without restrictions.
#include <utility>

#include "grammar/json_strings.hpp"
#include "grammar/schema_rules.hpp"

namespace kvzap::grammar {
namespace {

/// Deepest indentation.
constexpr std::int64_t most_blanks = 20;

Expr values_between(Expr open, const Expr& space, Expr values, Expr close) {
  return sequence(
      {std::move(open), space, optional(sequence({std::move(values), space})), std::move(close)});
}

}  // namespace

JsonRules::JsonRules(Grammar& grammar, const JsonSchemaOptions& options)
    : grammar_(grammar), space_(empty()), comma_(literal(",")), colon_(literal(":")) {
  if (!options.whitespace) return;
  // A rule, because it follows nearly every token.
  const Expr blank = literal(" ");
  space_ = call(grammar_.add(
      "white space",
      optional(choice({blank, sequence({literal("\n"), repeat(blank, 0, most_blanks)})}))));
  comma_ = sequence({literal(","), space_});
  colon_ = sequence({literal(":"), optional(blank)});
}

RuleId JsonRules::value() {
  if (value_ >= 0) return value_;
  value_ = grammar_.add("value");
  const Expr body =
      choice({call(object()), call(array()), call(string()), number_texts({}, NumberKind::any),
              literal("true"), literal("false"), literal("null")});
  grammar_.rules[static_cast<std::size_t>(value_)].body = body;
  return value_;
}

RuleId JsonRules::object() {
  if (object_ >= 0) return object_;
  object_ = grammar_.add("object");
  const Expr member = sequence({call(string()), colon_, call(value())});
  const Expr body =
      values_between(literal("{"), space_,
                     sequence({member, repeat(sequence({comma_, member}), 0)}), literal("}"));
  grammar_.rules[static_cast<std::size_t>(object_)].body = body;
  return object_;
}

RuleId JsonRules::array() {
  if (array_ >= 0) return array_;
  array_ = grammar_.add("array");
  const Expr element = call(value());
  const Expr body =
      values_between(literal("["), space_,
                     sequence({element, repeat(sequence({comma_, element}), 0)}), literal("]"));
  grammar_.rules[static_cast<std::size_t>(array_)].body = body;
  return array_;
}

RuleId JsonRules::string() {
  if (string_ < 0) string_ = grammar_.add("string", quoted(repeat(any_json_character(), 0)));
  return string_;
}

Expr JsonRules::literal_value(const SchemaJson& value) const {
  if (value.is_string()) return literal(json_string(value.get_ref<const std::string&>()));
  if (value.is_number_float()) {
    const Decimal number = decimal(value);
    // Integers have no point, as those of the type have none.
    return literal(number.is_integer() ? number.text() : value.dump());
  }
  if (!value.is_structured()) return literal(value.dump());
  std::vector<Expr> parts = {literal(value.is_array() ? "[" : "{")};
  for (const auto& [name, each] : value.items()) {
    parts.push_back(parts.size() == 1 ? space_ : comma_);
    if (value.is_object()) {
      parts.push_back(literal(json_string(name)));
      parts.push_back(colon_);
    }
    parts.push_back(literal_value(each));
  }
  if (!value.empty()) parts.push_back(space_);
  parts.push_back(literal(value.is_array() ? "]" : "}"));
  return sequence(std::move(parts));
}

}  // namespace kvzap::grammar
