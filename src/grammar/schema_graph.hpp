// The schemas of a JSON schema document, read keyword by keyword, and how they combine.
#pragma once

#include <cstdint>
#include <deque>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "grammar/expression.hpp"
#include "grammar/json_schema.hpp"
#include "grammar/number_ranges.hpp"

namespace kvzap::grammar {

using SchemaJson = nlohmann::ordered_json;
/// A schema of the document, or one made for a combination.
using SchemaId = std::int32_t;
/// Schemas that a value satisfies together. Sorted, each once.
using SchemaSet = std::vector<SchemaId>;

/// Kinds of values, as bits. Numbers are integers or fractions.
enum SchemaType : unsigned {
  null_type = 1,
  boolean_type = 2,
  integer_type = 4,
  fraction_type = 8,
  string_type = 16,
  array_type = 32,
  object_type = 64,
  all_types = 127,
};

/// How many characters, values or members there may be.
struct CountLimits {
  std::int64_t least = 0, most = unlimited;
  void tighten(const CountLimits& other);
};

/// What one schema says without a choice.
struct SchemaKeywords {
  std::string pointer;  // in messages: #/properties/a
  unsigned types = all_types;
  /// `enum` and `const`.
  std::optional<std::vector<const SchemaJson*>> values;
  /// Scalars that are left out.
  std::vector<const SchemaJson*> excluded;
  NumberLimits numbers;
  CountLimits length, members, items_count;
  /// `pattern` and `format`: contents of strings in canonical spelling.
  std::vector<Expr> contents;
  std::vector<SchemaId> prefix;
  std::optional<SchemaId> items;
  bool has_unique_items = false;
  bool has_properties = false;
  std::vector<std::pair<std::string, SchemaId>> properties;
  std::unordered_map<std::string, SchemaId> by_name;
  struct KeyPattern {
    std::string pattern;
    Expr keys;  // canonical contents
    SchemaId schema;
  };
  std::vector<KeyPattern> key_patterns;
  std::optional<SchemaId> additional, names;
  std::vector<std::string> required;
};

/// A schema of the document with its choices.
struct SchemaNode {
  const SchemaJson* json = nullptr;      // null for one that was made
  const SchemaJson* resource = nullptr;  // to which references are relative
  bool is_read = false;
  bool restricts = false;  // by its keywords
  SchemaKeywords keywords;
  std::vector<SchemaId> all;                    // allOf, $ref
  std::vector<std::vector<SchemaId>> any, one;  // anyOf, oneOf
  std::vector<SchemaId> none;                   // not
  struct Condition {
    SchemaId condition;
    std::optional<SchemaId> then, otherwise;
  };
  std::vector<Condition> conditions;
  bool is_open = false;  // its alternatives are being found
  std::optional<std::vector<SchemaSet>> alternatives;
};

/// The schemas of an untrusted document: its depth, the number of its values and all work are
/// bounded.
class SchemaGraph {
 public:
  /// `document` outlives the graph. Throws Error if it is nested too deeply or too large.
  explicit SchemaGraph(const SchemaJson& document);

  static constexpr SchemaId root = 0;
  const SchemaKeywords& keywords(SchemaId node) { return read(node).keywords; }
  /// A value satisfies all schemas of a set if it satisfies the keywords of all nodes in one of the
  /// returned sets. The choices of the schemas are multiplied out; sets that allow no type of value
  /// are left out.
  std::vector<SchemaSet> alternatives(const SchemaSet& schemas);
  /// Calls look(), which asks for alternatives while those of other schemas are being found. False
  /// if it needs those.
  template <class Look>
  bool looks(Look&& look) {
    ++m_looking;
    bool result = false;
    try {
      result = look();
    } catch (const Unfinished&) {
    }
    --m_looking;
    return result;
  }

  /// Counts towards the limit on work.
  void work(std::size_t amount);

  /// For the reader of keywords.
  SchemaId add(const SchemaJson& json, const SchemaJson* resource, std::string pointer);
  SchemaId add_made(SchemaKeywords keywords);
  /// A schema that all schemas of one of the sets satisfy.
  SchemaId add_choice(const std::string& pointer, std::vector<SchemaId> any);
  SchemaId resolve(const SchemaNode& from, const std::string& reference);

 private:
  using Alternatives = std::vector<SchemaSet>;
  struct Unfinished {};
  /// Values that do not satisfy a schema.
  struct Complement {
    Alternatives alternatives;
    bool is_exact = true;       // they are all such values
    bool has_absences = false;  // some lack a member that the schema requires
  };

  SchemaNode& read(SchemaId node);
  /// `base`: the URI of the resource around it.
  void index(const SchemaJson& json, int depth, const std::string& base);
  const Alternatives& alternatives_of(SchemaId node);
  Alternatives found_alternatives(SchemaId node);
  Alternatives any_of(const std::vector<SchemaId>& schemas);
  Alternatives one_of(SchemaId node, const std::vector<SchemaId>& branches);
  Alternatives with_condition(const SchemaNode& node, const SchemaNode::Condition& condition);
  Alternatives product(const Alternatives& a, const Alternatives& b);
  Complement complement(SchemaId node, int depth);
  Complement complement_of_keywords(SchemaId node, int depth);

  std::deque<SchemaNode> m_nodes;
  std::unordered_map<const SchemaJson*, SchemaId> m_by_json;
  std::unordered_map<std::string, const SchemaJson*> m_anchors, m_resources;  // by URI
  std::unordered_map<const SchemaJson*, std::string> m_bases;                 // URIs of resources
  std::size_t m_values = 0, m_work = 0;
  int m_open = 0, m_looking = 0;
};

/// Reads the keywords of node.json into the node.
void read_schema_keywords(SchemaGraph& graph, SchemaNode& node);

/// "JSON schema, POINTER: MESSAGE"
[[noreturn]] void fail_schema(const std::string& pointer, const std::string& message);
/// The part of `pointer` for a member or element.
std::string schema_pointer(const std::string& pointer, std::string_view member);

}  // namespace kvzap::grammar
