// Reads JSON schemas into grammars of the documents that they allow.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "grammar/expression.hpp"

namespace kvzap::grammar {

/// Largest nesting of a schema document, number of its values, of rules for it, and of steps to
/// combine its schemas.
inline constexpr int max_schema_depth = 64;
inline constexpr std::size_t max_schema_values = 1'000'000;
inline constexpr std::size_t max_schema_rules = 65'536;
inline constexpr std::size_t max_schema_work = 20'000'000;

struct JsonSchemaOptions {
  /// Between tokens may be nothing, a space, or a line end and up to 20 blanks; after a colon
  /// nothing or a space; before commas and colons nothing. Without it, documents are compact.
  bool whitespace = true;
  /// Objects with `properties` have no further keys unless `additionalProperties` or
  /// `patternProperties` says so. Otherwise they have, as the specification says.
  bool closed_objects = false;
};

/// Adds the rules of all documents that `schema` allows, and returns the first. Every text that it
/// makes is a valid document, with keys in the order of `properties`, then of `required`, then all
/// others. Throws Error "JSON schema, POINTER: …" for a schema that is wrong, allows no document,
/// exceeds the limits above, or restricts documents by what grammars cannot express
/// (docs/developers/text.md#grammars lists it); nothing that restricts documents is ignored.
RuleId add_json_schema(Grammar& grammar, const nlohmann::ordered_json& schema,
                       const JsonSchemaOptions& options = {});
/// Adds the rules of any JSON value, or of any JSON object.
RuleId add_any_json(Grammar& grammar, const JsonSchemaOptions& options = {});
RuleId add_any_json_object(Grammar& grammar, const JsonSchemaOptions& options = {});

/// A grammar whose root is the schema's rule.
Grammar read_json_schema(const nlohmann::ordered_json& schema,
                         const JsonSchemaOptions& options = {});

}  // namespace kvzap::grammar
