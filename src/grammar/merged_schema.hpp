// Several schemas that hold together, as one.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "grammar/schema_graph.hpp"

namespace kvzap::grammar {

/// The keywords of a set of nodes, united.
struct MergedSchema {
  MergedSchema(SchemaGraph& graph, const SchemaSet& nodes);

  std::vector<const SchemaKeywords*> parts;
  std::string pointer;  // of the first part
  unsigned types = all_types;
  NumberLimits numbers;
  CountLimits length, members, items_count;
  bool has_unique_items = false;
  std::vector<Expr> contents;
  std::vector<const SchemaJson*> excluded;
  /// `enum` and `const` of all parts; not yet compared with other keywords.
  std::optional<std::vector<const SchemaJson*>> values;

  /// Schemas of a member, of the i-th element, and of all elements after those.
  SchemaSet member(const std::string& name) const;
  SchemaSet element(std::size_t i) const;
  std::size_t prefix_length() const;
  /// Whether `additionalProperties` or `patternProperties` says something of further keys.
  bool speaks_of_further_keys() const;
  bool has_properties() const;
  /// Names of `properties` in their order, then of `required`.
  std::vector<std::string> names() const;
  bool requires_member(const std::string& name) const;
};

/// Contents of strings in canonical spelling; null if all are allowed. Without the values of
/// `enum`.
Expr string_contents(const MergedSchema& schema);
/// Whether the keys of an object may be `name`.
bool allows_name(SchemaGraph& graph, const MergedSchema& schema, const std::string& name);
/// The texts of numbers; null if there are none.
Expr numbers_of(const MergedSchema& schema);

/// Whether a value satisfies all schemas of the set.
bool accepts(SchemaGraph& graph, const SchemaSet& schemas, const SchemaJson& value);
/// Whether a value satisfies the keywords.
bool accepts(SchemaGraph& graph, const MergedSchema& schema, const SchemaJson& value);

/// The values that satisfy all schemas of the set, each once; nothing if `enum` and `const` do not
/// list them.
std::optional<std::vector<const SchemaJson*>> listed_values(SchemaGraph& graph,
                                                            const SchemaSet& schemas);

/// Whether no value satisfies the keywords of all nodes (`nodes` is one of the graph's
/// alternatives), as far as is seen `depth` levels deep in required members.
bool is_empty(SchemaGraph& graph, const SchemaSet& nodes, int depth);
/// The same of a set of schemas.
bool allows_nothing(SchemaGraph& graph, const SchemaSet& schemas, int depth);

}  // namespace kvzap::grammar
