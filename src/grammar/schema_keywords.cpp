// Reads the keywords of one schema.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "grammar/json_strings.hpp"
#include "grammar/regular_expression.hpp"
#include "grammar/schema_graph.hpp"

namespace kvzap::grammar {
namespace {

/// Counts above it are more than an answer has.
constexpr std::int64_t most_count = max_repeat_count;

class KeywordReader {
 public:
  KeywordReader(SchemaGraph& graph, SchemaNode& node)
      : m_graph(graph), m_node(node), m_json(*node.json), m_own(node.keywords) {}

  void read() {
    if (m_json.is_boolean()) {
      if (!m_json.get<bool>()) m_own.types = 0;
      m_node.restricts = m_own.types == 0;
      return;
    }
    if (!m_json.is_object()) fail("", "expected an object, true or false");
    refuse();
    types();
    values();
    numbers();
    strings();
    arrays();
    objects();
    choices();
    dependencies();
    m_node.restricts = restricts();
  }

 private:
  const SchemaJson* find(const char* keyword) const {
    const auto at = m_json.find(keyword);
    return at == m_json.end() ? nullptr : &*at;
  }

  [[noreturn]] void fail(std::string_view keyword, const std::string& message) const {
    fail_schema(keyword.empty() ? m_own.pointer : schema_pointer(m_own.pointer, keyword), message);
  }

  SchemaId child(const SchemaJson& json, std::string_view keyword) {
    return m_graph.add(json, m_node.resource, schema_pointer(m_own.pointer, keyword));
  }
  SchemaId child(const SchemaJson& json, std::string_view keyword, std::string_view member) {
    return m_graph.add(json, m_node.resource,
                       schema_pointer(schema_pointer(m_own.pointer, keyword), member));
  }

  std::vector<SchemaId> list(const SchemaJson& json, const char* keyword) {
    if (!json.is_array()) fail(keyword, "expected an array of schemas");
    std::vector<SchemaId> schemas;
    for (std::size_t i = 0; i < json.size(); ++i) {
      schemas.push_back(child(json[i], keyword, std::to_string(i)));
    }
    return schemas;
  }

  /// Keywords that restrict documents, and no grammar expresses.
  void refuse() const {
    for (const char* keyword :
         {"contains", "$dynamicRef", "$recursiveRef", "extends", "disallow", "divisibleBy"}) {
      if (find(keyword) != nullptr) fail(keyword, "not supported");
    }
  }

  void types() {
    if (const SchemaJson* type = find("type")) {
      m_own.types = 0;
      const bool is_list = type->is_array();
      for (const SchemaJson& each : is_list ? *type : SchemaJson::array({*type})) {
        m_own.types |= named_type(each);
      }
      const SchemaJson* nullable = find("nullable");  // of OpenAPI
      if (nullable != nullptr && *nullable == true) m_own.types |= null_type;
    }
  }

  unsigned named_type(const SchemaJson& name) const {
    constexpr std::pair<const char*, unsigned> names[] = {
        {"null", null_type},       {"boolean", boolean_type},
        {"integer", integer_type}, {"number", integer_type | fraction_type},
        {"string", string_type},   {"array", array_type},
        {"object", object_type}};
    for (const auto& [each, types] : names) {
      if (name == each) return types;
    }
    fail("type",
         "expected null, boolean, integer, number, string, array, object or a list of these");
  }

  void values() {
    if (const SchemaJson* constant = find("const")) m_own.values = {constant};
    const SchemaJson* allowed = find("enum");
    if (allowed == nullptr) return;
    if (!allowed->is_array()) fail("enum", "expected an array");
    if (m_own.values) {
      // Both hold: the other one becomes a schema of its own.
      SchemaKeywords constant;
      constant.pointer = m_own.pointer;
      constant.values = m_own.values;
      m_node.all.push_back(m_graph.add_made(std::move(constant)));
    }
    m_own.values.emplace();
    for (const SchemaJson& each : *allowed) m_own.values->push_back(&each);
  }

  void numbers() {
    bound("minimum", "exclusiveMinimum", true);
    bound("maximum", "exclusiveMaximum", false);
    if (const SchemaJson* divisor = find("multipleOf")) {
      const Decimal value = number("multipleOf", *divisor);
      if (!has_decimal_multiples(value)) {
        fail("multipleOf",
             "expected a number whose multiples end in certain digits, as 1, 2, 5, "
             "10, 0.5 or 0.01; found " +
                 value.text());
      }
      m_own.numbers.multiples_of.push_back(value);
    }
  }

  Decimal number(const char* keyword, const SchemaJson& value) const {
    if (!value.is_number()) fail(keyword, "expected a number");
    return decimal(value);
  }

  void bound(const char* keyword, const char* exclusive_keyword, bool is_least) {
    const SchemaJson* exclusive = find(exclusive_keyword);
    const bool strictly = exclusive != nullptr && *exclusive == true;  // of draft 4
    const auto tighten = [&](const NumberBound& each) {
      is_least ? m_own.numbers.tighten_least(each) : m_own.numbers.tighten_most(each);
    };
    if (const SchemaJson* inclusive = find(keyword)) {
      tighten({number(keyword, *inclusive), strictly});
    }
    if (exclusive != nullptr && !exclusive->is_boolean()) {
      tighten({number(exclusive_keyword, *exclusive), true});
    }
  }

  CountLimits counts(const char* least_keyword, const char* most_keyword) const {
    CountLimits limits;
    const auto count = [&](const char* keyword, std::int64_t otherwise) {
      const SchemaJson* json = find(keyword);
      if (json == nullptr) return otherwise;
      const double value = json->is_number() ? json->get<double>() : -1;
      if (value < 0 || std::floor(value) != value) fail(keyword, "expected a count");
      return static_cast<std::int64_t>(std::min(value, 1e15));
    };
    limits.least = count(least_keyword, 0);
    if (limits.least > most_count) {
      fail(least_keyword, fmt::format("expected at most {}", most_count));
    }
    limits.most = count(most_keyword, unlimited);
    // No answer has more.
    if (limits.most != unlimited) limits.most = std::min(limits.most, most_count);
    return limits;
  }

  void strings() {
    m_own.length = counts("minLength", "maxLength");
    if (const SchemaJson* pattern = find("pattern")) {
      if (!pattern->is_string()) fail("pattern", "expected a string");
      m_own.contents.push_back(regular_expression(pattern->get<std::string>(), "pattern"));
    }
    if (const SchemaJson* format = find("format"); format != nullptr && format->is_string()) {
      if (Expr texts = json_format(format->get_ref<const std::string&>())) {
        m_own.contents.push_back(std::move(texts));
      }
    }
  }

  Expr regular_expression(const std::string& pattern, std::string_view keyword) const {
    m_graph.work(pattern.size());
    try {
      return read_regular_expression(pattern, json_character, Extent::search);
    } catch (const Error& error) {
      fail(keyword, error.what());
    }
  }

  void arrays() {
    m_own.items_count = counts("minItems", "maxItems");
    const SchemaJson *items = find("items"), *prefix = find("prefixItems");
    if (prefix != nullptr) m_own.prefix = list(*prefix, "prefixItems");
    if (items != nullptr && items->is_array()) {
      if (prefix != nullptr) fail("items", "expected a schema beside prefixItems");
      m_own.prefix = list(*items, "items");
      if (const SchemaJson* further = find("additionalItems")) {
        m_own.items = child(*further, "additionalItems");
      }
    } else if (items != nullptr) {
      m_own.items = child(*items, "items");
    }
    const SchemaJson* unique = find("uniqueItems");
    m_own.has_unique_items = unique != nullptr && *unique == true;
    unevaluated("unevaluatedItems", m_own.items);
  }

  /// As additionalProperties (items), if no other schema evaluates members (elements).
  void unevaluated(const char* keyword, std::optional<SchemaId>& further) {
    const SchemaJson* schema = find(keyword);
    if (schema == nullptr || *schema == true) return;
    for (const char* other : {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas"}) {
      if (find(other) != nullptr) fail(keyword, fmt::format("not supported beside {}", other));
    }
    if (!further) further = child(*schema, keyword);
  }

  void objects() {
    m_own.members = counts("minProperties", "maxProperties");
    if (const SchemaJson* properties = find("properties")) {
      if (!properties->is_object()) fail("properties", "expected an object of schemas");
      m_own.has_properties = true;
      for (const auto& [name, schema] : properties->items()) {
        const SchemaId node = child(schema, "properties", name);
        m_own.properties.emplace_back(name, node);
        m_own.by_name.emplace(name, node);
      }
    }
    if (const SchemaJson* patterns = find("patternProperties")) {
      if (!patterns->is_object()) fail("patternProperties", "expected an object of schemas");
      for (const auto& [pattern, schema] : patterns->items()) {
        m_own.key_patterns.push_back({pattern, regular_expression(pattern, "patternProperties"),
                                      child(schema, "patternProperties", pattern)});
      }
    }
    if (const SchemaJson* further = find("additionalProperties")) {
      m_own.additional = child(*further, "additionalProperties");
    }
    unevaluated("unevaluatedProperties", m_own.additional);
    if (const SchemaJson* names = find("propertyNames"))
      m_own.names = child(*names, "propertyNames");
    if (const SchemaJson* required = find("required")) {
      m_own.required = name_list(*required, "required");
    }
  }

  std::vector<std::string> name_list(const SchemaJson& json, const char* keyword) const {
    if (!json.is_array()) fail(keyword, "expected an array of names");
    std::vector<std::string> names;
    for (const SchemaJson& name : json) {
      if (!name.is_string()) fail(keyword, "expected an array of names");
      names.push_back(name.get<std::string>());
    }
    return names;
  }

  void choices() {
    if (const SchemaJson* reference = find("$ref")) {
      if (!reference->is_string()) fail("$ref", "expected a string");
      m_node.all.push_back(m_graph.resolve(m_node, reference->get<std::string>()));
    }
    if (const SchemaJson* schemas = find("allOf")) {
      for (const SchemaId each : list(*schemas, "allOf")) m_node.all.push_back(each);
    }
    if (const SchemaJson* schemas = find("anyOf")) m_node.any.push_back(list(*schemas, "anyOf"));
    if (const SchemaJson* schemas = find("oneOf")) m_node.one.push_back(list(*schemas, "oneOf"));
    if (const SchemaJson* schema = find("not")) m_node.none.push_back(child(*schema, "not"));
    const SchemaJson *condition = find("if"), *then = find("then"), *otherwise = find("else");
    if (condition == nullptr || (then == nullptr && otherwise == nullptr)) return;
    SchemaNode::Condition all = {child(*condition, "if"), std::nullopt, std::nullopt};
    if (then != nullptr) all.then = child(*then, "then");
    if (otherwise != nullptr) all.otherwise = child(*otherwise, "else");
    m_node.conditions.push_back(all);
  }

  /// A member is absent, or what it brings with it holds.
  void dependencies() {
    for (const char* keyword : {"dependentRequired", "dependentSchemas", "dependencies"}) {
      const SchemaJson* all = find(keyword);
      if (all == nullptr) continue;
      if (!all->is_object()) fail(keyword, "expected an object");
      for (const auto& [name, brought] : all->items()) {
        SchemaKeywords absence;
        absence.pointer = schema_pointer(schema_pointer(m_own.pointer, keyword), name);
        SchemaKeywords false_schema = absence;
        false_schema.types = 0;
        const SchemaId none = m_graph.add_made(std::move(false_schema));
        absence.properties.emplace_back(name, none);
        absence.by_name.emplace(name, none);
        SchemaId present;
        if (brought.is_array()) {
          SchemaKeywords together;
          together.pointer = absence.pointer;
          together.required = name_list(brought, keyword);
          present = m_graph.add_made(std::move(together));
        } else {
          present = child(brought, keyword, name);
        }
        const std::string pointer = absence.pointer;
        m_node.any.push_back({m_graph.add_made(std::move(absence)), present});
      }
    }
  }

  bool restricts() const {
    const auto counts_restrict = [](const CountLimits& limits) {
      return limits.least > 0 || limits.most != unlimited;
    };
    return m_own.types != all_types || m_own.values || m_own.numbers.least || m_own.numbers.most ||
           !m_own.numbers.multiples_of.empty() || counts_restrict(m_own.length) ||
           counts_restrict(m_own.members) || counts_restrict(m_own.items_count) ||
           !m_own.contents.empty() || !m_own.prefix.empty() || m_own.items ||
           m_own.has_unique_items || m_own.has_properties || !m_own.key_patterns.empty() ||
           m_own.additional || m_own.names || !m_own.required.empty();
  }

  SchemaGraph& m_graph;
  SchemaNode& m_node;
  const SchemaJson& m_json;
  SchemaKeywords& m_own;
};

}  // namespace

void read_schema_keywords(SchemaGraph& graph, SchemaNode& node) {
  KeywordReader(graph, node).read();
}

void fail_schema(const std::string& pointer, const std::string& message) {
  // A key of the schema may be long.
  constexpr std::size_t most = 300;
  std::string shown = pointer.size() <= most ? pointer : pointer.substr(0, most) + "…";
  for (char& c : shown) {
    if (static_cast<unsigned char>(c) < ' ') c = '?';
  }
  throw Error(fmt::format("JSON schema, {}: {}", shown, message));
}

std::string schema_pointer(const std::string& pointer, std::string_view member) {
  std::string result = pointer + '/';
  for (const char c : member) {
    if (c == '~') {
      result += "~0";
    } else if (c == '/') {
      result += "~1";
    } else {
      result += c;
    }
  }
  return result;
}

void CountLimits::tighten(const CountLimits& other) {
  least = std::max(least, other.least);
  most = std::min(most, other.most);
}

}  // namespace kvzap::grammar
