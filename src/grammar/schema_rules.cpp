#include "grammar/schema_rules.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bitset>

#include "grammar/json_strings.hpp"
#include "grammar/regular_match.hpp"

namespace kvzap::grammar {
namespace {

/// Classes of keys are sets of patterns that match.
constexpr std::size_t most_key_patterns = 4;
/// Arrays of unique values have a rule for each set of them.
constexpr std::size_t most_unique = 8;

Expr any_contents() { return repeat(json_character({{0, last_code_point}}), 0); }

}  // namespace

SchemaRules::SchemaRules(Grammar& grammar, SchemaGraph& graph, const JsonSchemaOptions& options)
    : m_grammar(grammar),
      m_graph(graph),
      m_options(options),
      m_json(grammar, options),
      m_first(static_cast<RuleId>(grammar.rules.size())) {}

RuleId SchemaRules::add(const std::string& name) {
  if (m_grammar.rules.size() - static_cast<std::size_t>(m_first) >= max_schema_rules) {
    fail_schema("#", fmt::format("over {} rules", max_schema_rules));
  }
  return m_grammar.add(name);
}

RuleId SchemaRules::rule(const SchemaSet& schemas) {
  const auto known = m_by_schemas.find(schemas);
  if (known != m_by_schemas.end()) return known->second;
  const auto sets = m_graph.alternatives(schemas);
  RuleId result;
  if (sets.size() == 1) {
    result = rule_of_nodes(sets[0]);
  } else {
    result = add("schema");
    std::vector<Expr> choices;
    for (const SchemaSet& nodes : sets) choices.push_back(call(rule_of_nodes(nodes)));
    m_grammar.rules[static_cast<std::size_t>(result)].body =
        choices.empty() ? nothing() : choice(std::move(choices));
  }
  m_by_schemas.emplace(schemas, result);
  return result;
}

RuleId SchemaRules::rule_of_nodes(const SchemaSet& nodes) {
  if (nodes.empty()) return m_json.value();
  const auto known = m_by_nodes.find(nodes);
  if (known != m_by_nodes.end()) return known->second;
  const RuleId result = add(m_graph.keywords(nodes[0]).pointer);
  m_by_nodes.emplace(nodes, result);
  m_waiting.emplace_back(result, nodes);
  return result;
}

void SchemaRules::finish() {
  while (!m_waiting.empty()) {
    const auto [rule_id, nodes] = std::move(m_waiting.front());
    m_waiting.pop_front();
    const Expr texts = body(nodes);
    m_grammar.rules[static_cast<std::size_t>(rule_id)].body = texts;
  }
}

Expr SchemaRules::body(const SchemaSet& nodes) {
  MergedSchema schema(m_graph, nodes);
  std::vector<Expr> choices;
  if (schema.values) {
    const auto values = std::move(*schema.values);
    schema.values.reset();
    for (const SchemaJson* value : values) {
      if (accepts(m_graph, schema, *value)) choices.push_back(m_json.literal_value(*value));
    }
    return choices.empty() ? nothing() : choice(std::move(choices));
  }
  const auto is_excluded = [&](const SchemaJson& value) {
    return std::any_of(schema.excluded.begin(), schema.excluded.end(),
                       [&](const SchemaJson* each) { return *each == value; });
  };
  if ((schema.types & object_type) != 0) choices.push_back(object(schema));
  if ((schema.types & array_type) != 0) choices.push_back(array(schema));
  if ((schema.types & string_type) != 0) choices.push_back(string(schema));
  if (Expr numbers = numbers_of(schema)) choices.push_back(std::move(numbers));
  for (const bool truth : {true, false}) {
    if ((schema.types & boolean_type) == 0 || is_excluded(truth)) continue;
    choices.push_back(literal(truth ? "true" : "false"));
  }
  if ((schema.types & null_type) != 0) choices.push_back(literal("null"));
  return choices.empty() ? nothing() : choice(std::move(choices));
}

Expr SchemaRules::string(const MergedSchema& schema) {
  if (schema.length.least > schema.length.most) return nothing();
  const bool counts_alone = schema.contents.empty() && schema.excluded.empty();
  if (counts_alone && schema.length.least == 0 && schema.length.most == unlimited) {
    return call(m_json.string());
  }
  // Where characters are only counted, they may have any spelling.
  if (counts_alone) {
    return quoted(repeat(any_json_character(), schema.length.least, schema.length.most));
  }
  const Expr contents = string_contents(schema);
  return contents ? quoted(contents) : call(m_json.string());
}

Expr SchemaRules::array(const MergedSchema& schema) {
  const std::size_t prefix = schema.prefix_length();
  CountLimits limits = schema.items_count;
  for (std::size_t i = 0; i <= prefix; ++i) {
    if (allows_nothing(m_graph, schema.element(i), 0)) {
      limits.most = std::min(limits.most, static_cast<std::int64_t>(i));
      break;
    }
  }
  if (limits.least > limits.most) return nothing();
  if (schema.has_unique_items && limits.most > 1) return array_of_unique(schema, limits);
  const Expr end = sequence({m_json.space(), literal("]")});
  const auto given = std::min(static_cast<std::int64_t>(prefix), limits.most);
  // Elements after the first ones.
  const auto rest_limits = [&](std::int64_t before) {
    CountLimits rest;
    rest.least = std::max<std::int64_t>(0, limits.least - before);
    rest.most = limits.most == unlimited ? unlimited : limits.most - before;
    return rest;
  };
  Expr rest = end;
  if (given < limits.most) {
    const Expr element = call_value(schema.element(prefix));
    const Expr next = sequence({m_json.comma(), element});
    const auto [least, most] = rest_limits(given);
    if (given > 0) {
      rest = sequence({repeat(next, least, most), end});
    } else {
      const auto fewer = rest_limits(1);
      rest = sequence({element, repeat(next, fewer.least, fewer.most), end});
    }
  }
  // From the last of the first elements to the first; rules keep expressions shallow.
  for (std::int64_t i = given; i-- > 0;) {
    const RuleId after = add("elements");
    m_grammar.rules[static_cast<std::size_t>(after)].body =
        limits.least > i + 1 || i + 1 == given ? rest : choice({end, rest});
    const Expr element = call_value(schema.element(static_cast<std::size_t>(i)));
    rest = sequence({i > 0 ? m_json.comma() : empty(), element, call(after)});
  }
  std::vector<Expr> choices;
  if (limits.least == 0) choices.push_back(literal("]"));
  if (limits.most > 0) choices.push_back(rest);
  return sequence({literal("["), m_json.space(), choice(std::move(choices))});
}

/// Each set of values that precede has a rule.
Expr SchemaRules::array_of_unique(const MergedSchema& schema, const CountLimits& limits) {
  const auto values =
      schema.prefix_length() > 0 ? std::nullopt : listed_values(m_graph, schema.element(0));
  if (!values || values->size() > most_unique) {
    fail_schema(schema_pointer(schema.pointer, "uniqueItems"),
                fmt::format("supported only with maxItems 0 or 1, and for items that are one of "
                            "at most {} values of an enum",
                            most_unique));
  }
  const std::size_t sets = std::size_t{1} << values->size();
  std::vector<Expr> after(sets);
  for (std::size_t before = sets; before-- > 0;) {
    const auto count = static_cast<std::int64_t>(std::bitset<most_unique>(before).count());
    std::vector<Expr> choices;
    if (count >= limits.least) {
      choices.push_back(sequence({count > 0 ? m_json.space() : empty(), literal("]")}));
    }
    for (std::size_t i = 0; i < values->size() && count < limits.most; ++i) {
      if ((before >> i & 1U) != 0) continue;
      choices.push_back(
          sequence({count > 0 ? m_json.comma() : empty(), m_json.literal_value(*(*values)[i]),
                    after[before | std::size_t{1} << i]}));
    }
    const RuleId rest = add("unique");
    m_grammar.rules[static_cast<std::size_t>(rest)].body =
        choices.empty() ? nothing() : choice(std::move(choices));
    after[before] = call(rest);
  }
  return sequence({literal("["), m_json.space(), after[0]});
}

Expr SchemaRules::object(const MergedSchema& schema) {
  std::vector<Member> members;
  std::int64_t required = 0;
  for (const std::string& name : schema.names()) {
    const bool is_required = schema.requires_member(name);
    const SchemaSet schemas = schema.member(name);
    if (!allows_name(m_graph, schema, name) || allows_nothing(m_graph, schemas, 0)) {
      if (is_required) return nothing();
      continue;
    }
    members.push_back({name, schemas, is_required});
    required += is_required ? 1 : 0;
  }
  const auto further = further_keys(schema);
  CountLimits limits = schema.members;
  const auto declared = static_cast<std::int64_t>(members.size());
  if (limits.least <= required) limits.least = 0;
  if (further.empty() && limits.most >= declared) limits.most = unlimited;
  if (limits.most < required || (further.empty() && limits.least > declared)) return nothing();
  // A key may be repeated, which readers count once.
  if (limits.least > declared + 1) {
    fail_schema(schema.pointer, fmt::format("minProperties is supported up to {} here, one above "
                                            "the number of declared properties",
                                            declared + 1));
  }
  if (members.empty() && limits.least == 0 && limits.most == unlimited && further.size() == 1 &&
      further[0].keys == nullptr && further[0].schemas.empty()) {
    return call(m_json.object());
  }
  // ends[count]: what follows when `count` members precede, counted as far as it matters.
  std::int64_t counted = std::max<std::int64_t>(1, limits.least);
  if (limits.most != unlimited) counted = std::max(counted, std::min(limits.most, declared));
  std::vector<Expr> ends;
  for (std::int64_t count = 0; count <= counted; ++count) {
    ends.push_back(object_end(further, limits, count));
  }
  for (std::size_t i = members.size(); i-- > 0;) {
    const Member& member = members[i];
    const Expr value =
        sequence({literal(json_string(member.name)), m_json.colon(), call_value(member.schemas)});
    // No rule of states that the first i members cannot reach.
    const auto reachable = std::min(counted, static_cast<std::int64_t>(i) + 1);
    std::vector<Expr> after;
    for (std::int64_t count = 0; count <= reachable; ++count) {
      const RuleId state = add("members");
      m_grammar.rules[static_cast<std::size_t>(state)].body = ends[static_cast<std::size_t>(count)];
      after.push_back(call(state));
    }
    for (std::int64_t count = 0; count <= std::min(counted, static_cast<std::int64_t>(i));
         ++count) {
      std::vector<Expr> choices;
      if (count < limits.most) {
        const auto next = static_cast<std::size_t>(std::min(count + 1, reachable));
        choices.push_back(sequence({count > 0 ? m_json.comma() : empty(), value, after[next]}));
      }
      if (!member.is_required) choices.push_back(after[static_cast<std::size_t>(count)]);
      ends[static_cast<std::size_t>(count)] =
          choices.empty() ? nothing() : choice(std::move(choices));
    }
  }
  return sequence({literal("{"), m_json.space(), ends[0]});
}

Expr SchemaRules::object_end(const std::vector<KeyClass>& further, const CountLimits& limits,
                             std::int64_t count) {
  const Expr end = literal("}");
  const Expr space_end = count > 0 ? sequence({m_json.space(), end}) : end;
  const std::int64_t missing = std::max<std::int64_t>(0, limits.least - count);
  const std::int64_t most = limits.most == unlimited ? unlimited : limits.most - count;
  if (further.empty() || most <= 0) return missing == 0 ? space_end : nothing();
  if (missing > 1) return nothing();
  std::vector<Expr> choices;
  for (const KeyClass& each : further) {
    const Expr key = each.keys ? each.keys : call(m_json.string());
    choices.push_back(sequence({key, m_json.colon(), call_value(each.schemas)}));
  }
  const Expr member = choice(std::move(choices));
  const Expr next = sequence({m_json.comma(), member});
  if (count > 0) return sequence({repeat(next, missing, most), space_end});
  const Expr members = sequence(
      {member, repeat(next, 0, most == unlimited ? unlimited : most - 1), m_json.space(), end});
  return missing > 0 ? members : choice({end, members});
}

Expr SchemaRules::key_contents(const MergedSchema& schema) {
  Expr result;
  for (const SchemaKeywords* part : schema.parts) {
    if (!part->names) continue;
    std::vector<Expr> choices;
    for (const SchemaSet& nodes : m_graph.alternatives({*part->names})) {
      MergedSchema names(m_graph, nodes);
      if ((names.types & string_type) == 0) continue;
      if (!names.values) {
        const Expr contents = string_contents(names);
        choices.push_back(contents ? contents : any_contents());
        continue;
      }
      const auto values = std::move(*names.values);
      names.values.reset();
      for (const SchemaJson* value : values) {
        if (!value->is_string() || !accepts(m_graph, names, *value)) continue;
        const std::string text = json_string(value->get_ref<const std::string&>());
        choices.push_back(literal(text.substr(1, text.size() - 2)));
      }
    }
    const Expr allowed = choices.empty() ? nothing() : choice(std::move(choices));
    result = result ? both(result, allowed) : allowed;
  }
  return result;
}

std::vector<SchemaRules::KeyClass> SchemaRules::further_keys(const MergedSchema& schema) {
  std::vector<std::pair<std::string, Expr>> patterns;
  for (const SchemaKeywords* part : schema.parts) {
    for (const auto& each : part->key_patterns) {
      const auto is_same = [&](const auto& known) { return known.first == each.pattern; };
      if (std::none_of(patterns.begin(), patterns.end(), is_same)) {
        patterns.emplace_back(each.pattern, each.keys);
      }
    }
  }
  if (patterns.size() > most_key_patterns) {
    fail_schema(schema.pointer,
                fmt::format("over {} patternProperties for one object", most_key_patterns));
  }
  std::vector<Expr> declared;
  for (const std::string& name : schema.names()) {
    const std::string text = json_string(name);
    declared.push_back(literal(text.substr(1, text.size() - 2)));
  }
  const Expr allowed = key_contents(schema);
  const bool is_closed =
      m_options.closed_objects && schema.has_properties() && !schema.speaks_of_further_keys();
  std::vector<KeyClass> classes;
  for (unsigned matching = 0; matching < 1U << patterns.size(); ++matching) {
    if (matching == 0 && is_closed) continue;
    Expr keys = allowed;
    SchemaSet schemas;
    for (const SchemaKeywords* part : schema.parts) {
      bool is_known = false;
      for (const auto& each : part->key_patterns) {
        const auto is_same = [&](const auto& known) { return known.first == each.pattern; };
        const auto at = std::find_if(patterns.begin(), patterns.end(), is_same) - patterns.begin();
        if ((matching >> at & 1U) == 0) continue;
        is_known = true;
        schemas.push_back(each.schema);
      }
      if (!is_known && part->additional) schemas.push_back(*part->additional);
    }
    std::sort(schemas.begin(), schemas.end());
    schemas.erase(std::unique(schemas.begin(), schemas.end()), schemas.end());
    if (allows_nothing(m_graph, schemas, 0)) continue;
    for (std::size_t i = 0; i < patterns.size(); ++i) {
      if ((matching >> i & 1U) == 0) continue;
      keys = keys ? both(keys, patterns[i].second) : patterns[i].second;
    }
    const auto leave_out = [&](Expr texts) {
      keys = difference(keys ? keys : any_contents(), std::move(texts));
    };
    for (std::size_t i = 0; i < patterns.size(); ++i) {
      if ((matching >> i & 1U) == 0) leave_out(patterns[i].second);
    }
    if (!declared.empty()) leave_out(choice(declared));
    classes.push_back({keys ? quoted(keys) : nullptr, std::move(schemas)});
  }
  return classes;
}

}  // namespace kvzap::grammar
