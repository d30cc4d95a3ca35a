#include "grammar/json_schema.hpp"

#include "grammar/live_rules.hpp"
#include "grammar/schema_graph.hpp"
#include "grammar/schema_rules.hpp"

namespace kvzap::grammar {

RuleId add_json_schema(Grammar& grammar, const nlohmann::ordered_json& schema,
                       const JsonSchemaOptions& options) {
  const auto first = static_cast<RuleId>(grammar.rules.size());
  SchemaGraph graph(schema);
  SchemaRules rules(grammar, graph, options);
  const RuleId root = rules.rule({SchemaGraph::root});
  rules.finish();
  if (!makes_text(grammar, first, root)) fail_schema("#", "no document satisfies it");
  return root;
}

RuleId add_any_json(Grammar& grammar, const JsonSchemaOptions& options) {
  return JsonRules(grammar, options).value();
}

RuleId add_any_json_object(Grammar& grammar, const JsonSchemaOptions& options) {
  return JsonRules(grammar, options).object();
}

Grammar read_json_schema(const nlohmann::ordered_json& schema, const JsonSchemaOptions& options) {
  Grammar grammar;
  grammar.root = add_json_schema(grammar, schema, options);
  return grammar;
}

}  // namespace kvzap::grammar
