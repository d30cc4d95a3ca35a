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
    : m_grammar(grammar), m_space(empty()), m_comma(literal(",")), m_colon(literal(":")) {
  if (!options.whitespace) return;
  // A rule, because it follows nearly every token.
  const Expr blank = literal(" ");
  m_space = call(m_grammar.add(
      "white space",
      optional(choice({blank, sequence({literal("\n"), repeat(blank, 0, most_blanks)})}))));
  m_comma = sequence({literal(","), m_space});
  m_colon = sequence({literal(":"), optional(blank)});
}

RuleId JsonRules::value() {
  if (m_value >= 0) return m_value;
  m_value = m_grammar.add("value");
  const Expr body =
      choice({call(object()), call(array()), call(string()), number_texts({}, NumberKind::any),
              literal("true"), literal("false"), literal("null")});
  m_grammar.rules[static_cast<std::size_t>(m_value)].body = body;
  return m_value;
}

RuleId JsonRules::object() {
  if (m_object >= 0) return m_object;
  m_object = m_grammar.add("object");
  const Expr member = sequence({call(string()), m_colon, call(value())});
  const Expr body =
      values_between(literal("{"), m_space,
                     sequence({member, repeat(sequence({m_comma, member}), 0)}), literal("}"));
  m_grammar.rules[static_cast<std::size_t>(m_object)].body = body;
  return m_object;
}

RuleId JsonRules::array() {
  if (m_array >= 0) return m_array;
  m_array = m_grammar.add("array");
  const Expr element = call(value());
  const Expr body =
      values_between(literal("["), m_space,
                     sequence({element, repeat(sequence({m_comma, element}), 0)}), literal("]"));
  m_grammar.rules[static_cast<std::size_t>(m_array)].body = body;
  return m_array;
}

RuleId JsonRules::string() {
  if (m_string < 0) m_string = m_grammar.add("string", quoted(repeat(any_json_character(), 0)));
  return m_string;
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
    parts.push_back(parts.size() == 1 ? m_space : m_comma);
    if (value.is_object()) {
      parts.push_back(literal(json_string(name)));
      parts.push_back(m_colon);
    }
    parts.push_back(literal_value(each));
  }
  if (!value.empty()) parts.push_back(m_space);
  parts.push_back(literal(value.is_array() ? "]" : "}"));
  return sequence(std::move(parts));
}

}  // namespace kvzap::grammar
