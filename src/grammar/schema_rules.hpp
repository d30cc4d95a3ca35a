// Makes grammar rules of a graph of schemas.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "grammar/json_schema.hpp"
#include "grammar/merged_schema.hpp"
#include "grammar/schema_graph.hpp"

namespace kvzap::grammar {

/// Punctuation between JSON tokens and the rules of values without restrictions.
class JsonRules {
 public:
  JsonRules(Grammar& grammar, const JsonSchemaOptions& options);

  RuleId value();
  RuleId object();
  RuleId array();
  RuleId string();
  /// White space inside brackets and after commas.
  const Expr& space() const { return m_space; }
  /// "," and white space.
  const Expr& comma() const { return m_comma; }
  /// ":" and white space.
  const Expr& colon() const { return m_colon; }
  /// A given value, with white space.
  Expr literal_value(const SchemaJson& value) const;

 private:
  Grammar& m_grammar;
  Expr m_space, m_comma, m_colon;
  RuleId m_value = -1, m_object = -1, m_array = -1, m_string = -1;
};

/// Rules of the schemas of a graph. Each set of schemas that hold together becomes one rule, so
/// recursive schemas become recursive rules.
class SchemaRules {
 public:
  SchemaRules(Grammar& grammar, SchemaGraph& graph, const JsonSchemaOptions& options);

  /// The rule of values that satisfy all schemas. Call `finish` afterwards.
  RuleId rule(const SchemaSet& schemas);
  /// Adds the bodies of all rules.
  void finish();

 private:
  /// Keys that the same patterns match, and their values.
  struct KeyClass {
    Expr keys;  // with quotation marks
    SchemaSet schemas;
  };
  struct Member {
    std::string name;
    SchemaSet schemas;
    bool is_required;
  };

  RuleId add(const std::string& name);
  RuleId rule_of_nodes(const SchemaSet& nodes);
  Expr body(const SchemaSet& nodes);
  Expr string(const MergedSchema& schema);
  Expr array(const MergedSchema& schema);
  Expr array_of_unique(const MergedSchema& schema, const CountLimits& limits);
  Expr object(const MergedSchema& schema);
  std::vector<KeyClass> further_keys(const MergedSchema& schema);
  /// Contents of keys that `propertyNames` allows; null if all are.
  Expr key_contents(const MergedSchema& schema);
  /// The rest of an object after its n-th member; `count` members precede.
  Expr object_end(const std::vector<KeyClass>& further, const CountLimits& limits,
                  std::int64_t count);
  Expr call_value(const SchemaSet& schemas) { return call(rule(schemas)); }

  Grammar& m_grammar;
  SchemaGraph& m_graph;
  JsonSchemaOptions m_options;
  JsonRules m_json;
  RuleId m_first;
  std::map<SchemaSet, RuleId> m_by_schemas, m_by_nodes;
  std::deque<std::pair<RuleId, SchemaSet>> m_waiting;
};

}  // namespace kvzap::grammar
