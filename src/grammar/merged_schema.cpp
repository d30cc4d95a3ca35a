#include "grammar/merged_schema.hpp"

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <unordered_set>

#include "grammar/json_strings.hpp"
#include "grammar/regular_match.hpp"
#include "text/utf8.hpp"

namespace kvzap::grammar {
namespace {

/// The same text for equal values: numbers by value, members in any order.
std::string identity(const SchemaJson& value) {
  if (value.is_number()) return decimal(value).text();
  if (value.is_array()) {
    std::string text = "[";
    for (const SchemaJson& each : value) text += identity(each) + ",";
    return text + "]";
  }
  if (value.is_object()) {
    std::vector<std::string> members;
    for (const auto& [name, each] : value.items()) {
      members.push_back(json_string(name) + ":" + identity(each) + ",");
    }
    std::sort(members.begin(), members.end());
    std::string text = "{";
    for (const auto& each : members) text += each;
    return text + "}";
  }
  return value.is_string() ? json_string(value.get_ref<const std::string&>()) : value.dump();
}

unsigned type_of(const SchemaJson& value) {
  if (value.is_null()) return null_type;
  if (value.is_boolean()) return boolean_type;
  if (value.is_number()) return decimal(value).is_integer() ? integer_type : fraction_type;
  if (value.is_string()) return string_type;
  return value.is_array() ? array_type : object_type;
}

std::string content_of(const std::string& text) {
  const std::string quoted_text = json_string(text);
  return quoted_text.substr(1, quoted_text.size() - 2);
}

void add_unique(SchemaSet& set, SchemaId node) {
  const auto at = std::lower_bound(set.begin(), set.end(), node);
  if (at == set.end() || *at != node) set.insert(at, node);
}

std::int64_t code_points(const std::string& text) {
  return std::count_if(text.begin(), text.end(),
                       [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; });
}

bool within(const CountLimits& limits, std::int64_t count) {
  return count >= limits.least && count <= limits.most;
}

bool accepts_number(const MergedSchema& schema, const SchemaJson& value) {
  const Decimal number = decimal(value);
  NumberLimits limits = schema.numbers;
  limits.tighten_least({number, false});
  limits.tighten_most({number, false});
  if (limits.are_contradictory()) return false;
  limits.least.reset();
  limits.most.reset();
  return limits.multiples_of.empty() ||
         matches(number_texts(limits, NumberKind::any), number.text());
}

bool accepts_string(SchemaGraph& graph, const MergedSchema& schema, const std::string& text) {
  if (!within(schema.length, code_points(text))) return false;
  const std::string content = content_of(text);
  return std::all_of(schema.contents.begin(), schema.contents.end(), [&](const Expr& each) {
    graph.work(content.size() * content.size());
    return matches(each, content);
  });
}

bool accepts_object(SchemaGraph& graph, const MergedSchema& schema, const SchemaJson& value) {
  if (!within(schema.members, static_cast<std::int64_t>(value.size()))) return false;
  for (const SchemaKeywords* part : schema.parts) {
    for (const std::string& name : part->required) {
      if (!value.contains(name)) return false;
    }
  }
  for (const auto& [name, each] : value.items()) {
    if (!allows_name(graph, schema, name) || !accepts(graph, schema.member(name), each)) {
      return false;
    }
  }
  return true;
}

}  // namespace

MergedSchema::MergedSchema(SchemaGraph& graph, const SchemaSet& nodes) : pointer("#") {
  for (const SchemaId node : nodes) {
    const SchemaKeywords& own = graph.keywords(node);
    if (parts.empty()) pointer = own.pointer;
    parts.push_back(&own);
    graph.work(1 + own.properties.size());
    types &= own.types;
    numbers.tighten(own.numbers);
    length.tighten(own.length);
    members.tighten(own.members);
    items_count.tighten(own.items_count);
    has_unique_items |= own.has_unique_items;
    contents.insert(contents.end(), own.contents.begin(), own.contents.end());
    excluded.insert(excluded.end(), own.excluded.begin(), own.excluded.end());
    if (!own.values) continue;
    graph.work(own.values->size());
    if (!values) {
      values = own.values;
      continue;
    }
    std::unordered_set<std::string> others;
    for (const SchemaJson* each : *own.values) others.insert(identity(*each));
    const auto left_out = [&](const SchemaJson* each) {
      return others.count(identity(*each)) == 0;
    };
    values->erase(std::remove_if(values->begin(), values->end(), left_out), values->end());
  }
  const auto is_excluded = [&](const SchemaJson& value) {
    return std::any_of(excluded.begin(), excluded.end(),
                       [&](const SchemaJson* each) { return *each == value; });
  };
  if (is_excluded(nullptr)) types &= ~unsigned{null_type};
  if (is_excluded(true) && is_excluded(false)) types &= ~unsigned{boolean_type};
}

SchemaSet MergedSchema::member(const std::string& name) const {
  SchemaSet result;
  const std::string content = content_of(name);
  for (const SchemaKeywords* part : parts) {
    const auto declared = part->by_name.find(name);
    bool is_known = declared != part->by_name.end();
    if (is_known) add_unique(result, declared->second);
    for (const auto& each : part->key_patterns) {
      if (!matches(each.keys, content)) continue;
      is_known = true;
      add_unique(result, each.schema);
    }
    if (!is_known && part->additional) add_unique(result, *part->additional);
  }
  return result;
}

SchemaSet MergedSchema::element(std::size_t i) const {
  SchemaSet result;
  for (const SchemaKeywords* part : parts) {
    if (i < part->prefix.size()) {
      add_unique(result, part->prefix[i]);
    } else if (part->items) {
      add_unique(result, *part->items);
    }
  }
  return result;
}

std::size_t MergedSchema::prefix_length() const {
  std::size_t length_of_all = 0;
  for (const SchemaKeywords* part : parts) {
    length_of_all = std::max(length_of_all, part->prefix.size());
  }
  return length_of_all;
}

bool MergedSchema::speaks_of_further_keys() const {
  return std::any_of(parts.begin(), parts.end(), [](const SchemaKeywords* part) {
    return part->additional || !part->key_patterns.empty();
  });
}

bool MergedSchema::has_properties() const {
  return std::any_of(parts.begin(), parts.end(),
                     [](const SchemaKeywords* part) { return part->has_properties; });
}

std::vector<std::string> MergedSchema::names() const {
  std::vector<std::string> result;
  std::unordered_set<std::string> seen;
  for (const SchemaKeywords* part : parts) {
    for (const auto& [name, schema] : part->properties) {
      if (seen.insert(name).second) result.push_back(name);
    }
  }
  for (const SchemaKeywords* part : parts) {
    for (const std::string& name : part->required) {
      if (seen.insert(name).second) result.push_back(name);
    }
  }
  return result;
}

bool MergedSchema::requires_member(const std::string& name) const {
  return std::any_of(parts.begin(), parts.end(), [&](const SchemaKeywords* part) {
    return std::find(part->required.begin(), part->required.end(), name) != part->required.end();
  });
}

Expr string_contents(const MergedSchema& schema) {
  std::vector<Expr> all = schema.contents;
  const Expr character = json_character({{0, last_code_point}});
  std::vector<Expr> excluded;
  for (const SchemaJson* each : schema.excluded) {
    if (each->is_string()) excluded.push_back(literal(content_of(each->get<std::string>())));
  }
  if (schema.length.least > 0 || schema.length.most != unlimited ||
      (all.empty() && !excluded.empty())) {
    all.push_back(repeat(character, schema.length.least, schema.length.most));
  }
  if (all.empty()) return nullptr;
  Expr result = all[0];
  for (std::size_t i = 1; i < all.size(); ++i) result = both(result, all[i]);
  return excluded.empty() ? result : difference(result, choice(std::move(excluded)));
}

bool allows_name(SchemaGraph& graph, const MergedSchema& schema, const std::string& name) {
  return std::all_of(schema.parts.begin(), schema.parts.end(), [&](const SchemaKeywords* part) {
    return !part->names || accepts(graph, {*part->names}, SchemaJson(name));
  });
}

Expr numbers_of(const MergedSchema& schema) {
  const unsigned kinds = schema.types & (integer_type | fraction_type);
  if (kinds == 0 || schema.numbers.are_contradictory()) return nullptr;
  if (kinds == integer_type) return number_texts(schema.numbers, NumberKind::integer);
  if (kinds == fraction_type) return number_texts(schema.numbers, NumberKind::fraction);
  return number_texts(schema.numbers, NumberKind::any);
}

bool accepts(SchemaGraph& graph, const SchemaSet& schemas, const SchemaJson& value) {
  for (const SchemaSet& nodes : graph.alternatives(schemas)) {
    if (accepts(graph, MergedSchema(graph, nodes), value)) return true;
  }
  return false;
}

bool accepts(SchemaGraph& graph, const MergedSchema& schema, const SchemaJson& value) {
  graph.work(1);
  if ((schema.types & type_of(value)) == 0) return false;
  for (const SchemaJson* each : schema.excluded) {
    if (*each == value) return false;
  }
  if (schema.values) {
    const std::string own = identity(value);
    const bool is_listed =
        std::any_of(schema.values->begin(), schema.values->end(),
                    [&](auto* each) { return each == &value || identity(*each) == own; });
    if (!is_listed) return false;
  }
  if (value.is_number()) return accepts_number(schema, value);
  if (value.is_string()) return accepts_string(graph, schema, value.get_ref<const std::string&>());
  if (value.is_object()) return accepts_object(graph, schema, value);
  if (!value.is_array()) return true;
  if (!within(schema.items_count, static_cast<std::int64_t>(value.size()))) return false;
  std::unordered_set<std::string> others;
  for (std::size_t i = 0; i < value.size(); ++i) {
    if (schema.has_unique_items && !others.insert(identity(value[i])).second) return false;
    if (!accepts(graph, schema.element(i), value[i])) return false;
  }
  return true;
}

std::optional<std::vector<const SchemaJson*>> listed_values(SchemaGraph& graph,
                                                            const SchemaSet& schemas) {
  std::vector<const SchemaJson*> result;
  std::unordered_set<std::string> known;
  for (const SchemaSet& nodes : graph.alternatives(schemas)) {
    MergedSchema schema(graph, nodes);
    if (!schema.values) return std::nullopt;
    const auto values = std::move(*schema.values);
    schema.values.reset();
    for (const SchemaJson* each : values) {
      if (accepts(graph, schema, *each) && known.insert(identity(*each)).second) {
        result.push_back(each);
      }
    }
  }
  return result;
}

bool is_empty(SchemaGraph& graph, const SchemaSet& nodes, int depth) {
  MergedSchema schema(graph, nodes);
  if (schema.values) {
    const auto values = std::move(schema.values);
    schema.values.reset();
    return std::none_of(values->begin(), values->end(),
                        [&](const SchemaJson* each) { return accepts(graph, schema, *each); });
  }
  if (schema.numbers.are_contradictory()) schema.types &= ~unsigned{integer_type | fraction_type};
  const auto is_contradictory = [](const CountLimits& limits) {
    return limits.least > limits.most;
  };
  if (is_contradictory(schema.length)) schema.types &= ~unsigned{string_type};
  if (is_contradictory(schema.items_count)) schema.types &= ~unsigned{array_type};
  if (is_contradictory(schema.members)) schema.types &= ~unsigned{object_type};
  if ((schema.types & object_type) == 0) return schema.types == 0;
  for (const std::string& name : schema.names()) {
    if (!schema.requires_member(name)) continue;
    if (!allows_name(graph, schema, name) ||
        allows_nothing(graph, schema.member(name), depth - 1)) {
      schema.types &= ~unsigned{object_type};
      break;
    }
  }
  return schema.types == 0;
}

bool allows_nothing(SchemaGraph& graph, const SchemaSet& schemas, int depth) {
  return graph.looks([&] {
    const auto sets = graph.alternatives(schemas);
    if (depth < 0) return sets.empty();
    return std::all_of(sets.begin(), sets.end(),
                       [&](const SchemaSet& nodes) { return is_empty(graph, nodes, depth); });
  });
}

}  // namespace kvzap::grammar
