#include "grammar/schema_graph.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "grammar/json_strings.hpp"
#include "grammar/merged_schema.hpp"

namespace kvzap::grammar {
namespace {

constexpr std::size_t most_alternatives = 10'000;
constexpr int deepest_reference = 64, deepest_complement = 3;

/// A fragment's %XX.
std::string unescaped_fragment(std::string_view text) {
  const auto hexadecimal = [](char c) -> int {
    if (c >= '0' && c <= '9') return c - '0';
    const char lower = static_cast<char>(c | 0x20);
    return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
  };
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size() && hexadecimal(text[i + 1]) >= 0 &&
        hexadecimal(text[i + 2]) >= 0) {
      result += static_cast<char>(hexadecimal(text[i + 1]) * 16 + hexadecimal(text[i + 2]));
      i += 2;
    } else {
      result += text[i];
    }
  }
  return result;
}

/// A part of a JSON pointer, without ~0 and ~1.
std::string unescaped_member(std::string_view text) {
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '~' && i + 1 < text.size() && (text[i + 1] == '0' || text[i + 1] == '1')) {
      result += text[++i] == '0' ? '~' : '/';
    } else {
      result += text[i];
    }
  }
  return result;
}

const std::string* string_member(const SchemaJson& json, const char* name) {
  if (!json.is_object()) return nullptr;
  const auto at = json.find(name);
  return at != json.end() && at->is_string() ? &at->get_ref<const std::string&>() : nullptr;
}

/// The identifier that makes a schema a resource of its own; null if there is none.
const std::string* resource_id(const SchemaJson& json) {
  const std::string* id = string_member(json, "$id");
  return id != nullptr && !id->empty() && (*id)[0] != '#' ? id : nullptr;
}

/// The length of a URI's scheme with its colon; 0: it has none.
std::size_t scheme_length(std::string_view uri) {
  const std::size_t end = uri.find_first_of(":/?");
  return end != uri.npos && end > 0 && uri[end] == ':' ? end + 1 : 0;
}

/// A path without the segments "." and "..".
std::string path_without_dots(std::string_view path) {
  std::vector<std::string_view> segments;
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t end = std::min(path.find('/', begin), path.size());
    const std::string_view segment = path.substr(begin, end - begin);
    const bool is_up = segment == "..", is_last = end == path.size();
    const bool has_parent = segments.size() > 1 || (segments.size() == 1 && !segments[0].empty());
    if (is_up && has_parent) segments.pop_back();
    if (!is_up && segment != ".") segments.push_back(segment);
    if ((is_up || segment == ".") && is_last) segments.emplace_back();
    begin = end + 1;
  }
  std::string result;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    if (i > 0) result += '/';
    result += segments[i];
  }
  return result;
}

/// A reference without a fragment, relative to a base (RFC 3986, 5.2).
std::string resolved_uri(std::string_view base, std::string_view reference) {
  if (reference.empty()) return std::string(base);
  if (scheme_length(reference) > 0) return std::string(reference);
  base = base.substr(0, base.find('?'));
  std::size_t path = scheme_length(base);
  if (reference.substr(0, 2) == "//") return std::string(base.substr(0, path)).append(reference);
  if (base.substr(path, 2) == "//") path = std::min(base.find('/', path + 2), base.size());
  std::string whole(base.substr(path, base.rfind('/') + 1 - std::min(path, base.rfind('/') + 1)));
  if (whole.empty() && path > scheme_length(base)) whole = "/";
  if (reference.front() == '/') whole.clear();
  return std::string(base.substr(0, path)) + path_without_dots(whole.append(reference));
}

SchemaSet joined(const SchemaSet& a, const SchemaSet& b) {
  SchemaSet result;
  std::set_union(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(result));
  return result;
}

void sort_unique(std::vector<SchemaSet>& sets) {
  std::sort(sets.begin(), sets.end());
  sets.erase(std::unique(sets.begin(), sets.end()), sets.end());
}

}  // namespace

SchemaGraph::SchemaGraph(const SchemaJson& document) {
  index(document, 0, "");
  add(document, &document, "#");
}

void SchemaGraph::index(const SchemaJson& json, int depth, const std::string& base) {
  if (depth > max_schema_depth) fail_schema("#", fmt::format("over {} levels", max_schema_depth));
  if (++m_values > max_schema_values) {
    fail_schema("#", fmt::format("over {} values", max_schema_values));
  }
  const std::string* own = &base;
  if (const std::string* id = resource_id(json)) {
    std::string uri = resolved_uri(base, std::string_view(*id).substr(0, id->find('#')));
    work(uri.size());
    own = &m_bases.emplace(&json, std::move(uri)).first->second;
    m_resources.emplace(*own, &json);
  }
  const auto add_anchor = [&](const std::string& fragment) {
    work(own->size());
    m_anchors.emplace(*own + fragment, &json);
  };
  if (const std::string* anchor = string_member(json, "$anchor")) add_anchor("#" + *anchor);
  const std::string* id = string_member(json, "$id");
  if (id != nullptr && !id->empty() && (*id)[0] == '#') add_anchor(*id);
  if (json.is_structured()) {
    for (const SchemaJson& each : json) index(each, depth + 1, *own);
  }
}

void SchemaGraph::work(std::size_t amount) {
  m_work += amount;
  if (m_work > max_schema_work) fail_schema("#", "its schemas have too many combinations");
}

SchemaId SchemaGraph::add(const SchemaJson& json, const SchemaJson* resource, std::string pointer) {
  const auto [at, is_new] = m_by_json.try_emplace(&json, static_cast<SchemaId>(m_nodes.size()));
  if (!is_new) return at->second;
  SchemaNode node;
  node.json = &json;
  node.resource = resource_id(json) != nullptr ? &json : resource;
  node.keywords.pointer = std::move(pointer);
  m_nodes.push_back(std::move(node));
  return at->second;
}

SchemaId SchemaGraph::add_made(SchemaKeywords keywords) {
  work(1);
  SchemaNode node;
  node.keywords = std::move(keywords);
  node.is_read = node.restricts = true;
  m_nodes.push_back(std::move(node));
  return static_cast<SchemaId>(m_nodes.size()) - 1;
}

SchemaId SchemaGraph::add_choice(const std::string& pointer, std::vector<SchemaId> any) {
  SchemaKeywords keywords;
  keywords.pointer = pointer;
  const SchemaId node = add_made(std::move(keywords));
  m_nodes[static_cast<std::size_t>(node)].restricts = false;
  m_nodes[static_cast<std::size_t>(node)].any.push_back(std::move(any));
  return node;
}

SchemaId SchemaGraph::resolve(const SchemaNode& from, const std::string& reference) {
  const auto fail = [&](const std::string& message) {
    fail_schema(schema_pointer(from.keywords.pointer, "$ref"), message);
  };
  const auto hash = std::min(reference.find('#'), reference.size());
  const auto base_of = [&](const SchemaJson* resource) {
    const auto known = m_bases.find(resource);
    return known == m_bases.end() ? std::string() : known->second;
  };
  const SchemaJson* at = from.resource;
  if (hash > 0) {
    const std::string base = base_of(at);
    work(base.size());
    const auto known = m_resources.find(resolved_uri(base, reference.substr(0, hash)));
    if (known == m_resources.end()) {
      fail(fmt::format("expected a reference within the document, as #/$defs/name, found '{}'",
                       reference.substr(0, 200)));
    }
    at = known->second;
  }
  const std::string fragment =
      hash < reference.size() ? unescaped_fragment(reference.substr(hash + 1)) : "";
  if (!fragment.empty() && fragment[0] != '/') {
    const auto anchor = m_anchors.find(base_of(at) + "#" + fragment);
    if (anchor == m_anchors.end()) fail(fmt::format("no anchor '{}'", fragment.substr(0, 200)));
    return add(*anchor->second, at, "#" + fragment);
  }
  const SchemaJson* resource = at;
  for (std::size_t begin = 1; begin <= fragment.size();) {
    const auto end = std::min(fragment.find('/', begin), fragment.size());
    const std::string member = unescaped_member(fragment.substr(begin, end - begin));
    const SchemaJson* next = nullptr;
    if (at->is_object()) {
      const auto found = at->find(member);
      if (found != at->end()) next = &*found;
    } else if (at->is_array() && !member.empty() && member.size() < 8 &&
               member.find_first_not_of("0123456789") == std::string::npos) {
      const auto number = static_cast<std::size_t>(std::stoul(member));
      if (number < at->size()) next = &(*at)[number];
    }
    if (next == nullptr) fail(fmt::format("nothing is at '{}'", reference.substr(0, 200)));
    at = next;
    if (resource_id(*at) != nullptr) resource = at;
    begin = end + 1;
  }
  return add(*at, resource, fragment.empty() ? "#" : "#" + fragment);
}

SchemaNode& SchemaGraph::read(SchemaId node) {
  SchemaNode& result = m_nodes[static_cast<std::size_t>(node)];
  if (!result.is_read) {
    result.is_read = true;
    work(1 + result.json->size());
    read_schema_keywords(*this, result);
  }
  return result;
}

std::vector<SchemaSet> SchemaGraph::alternatives(const SchemaSet& schemas) {
  Alternatives result = {{}};
  for (const SchemaId schema : schemas) result = product(result, alternatives_of(schema));
  return result;
}

const SchemaGraph::Alternatives& SchemaGraph::alternatives_of(SchemaId node) {
  SchemaNode& known = read(node);
  if (known.alternatives) return *known.alternatives;
  if (known.is_open && m_looking > 0) throw Unfinished();
  if (known.is_open) {
    fail_schema(known.keywords.pointer, "the schema refers to itself for the same value");
  }
  if (m_open == deepest_reference) {
    fail_schema(known.keywords.pointer,
                fmt::format("over {} references to references", deepest_reference));
  }
  struct Opened {
    SchemaNode& node;
    int& count;
    Opened(SchemaNode& opened, int& opened_count) : node(opened), count(opened_count) {
      node.is_open = true;
      ++count;
    }
    ~Opened() {
      node.is_open = false;
      --count;
    }
  };
  const Opened opened(known, m_open);
  known.alternatives = found_alternatives(node);
  return *known.alternatives;
}

SchemaGraph::Alternatives SchemaGraph::found_alternatives(SchemaId id) {
  const SchemaNode& node = read(id);
  Alternatives result = {{}};
  if (node.restricts) result = {{id}};
  if (node.keywords.types == 0) return {};
  for (const SchemaId each : node.all) result = product(result, alternatives_of(each));
  for (const auto& each : node.any) result = product(result, any_of(each));
  for (const auto& each : node.one) result = product(result, one_of(id, each));
  for (const SchemaId each : node.none) {
    const Complement others = complement(each, 0);
    if (!others.is_exact) {
      fail_schema(schema_pointer(node.keywords.pointer, "not"),
                  "supported only for types, required members, bounds, enum and const");
    }
    result = product(result, others.alternatives);
  }
  for (const auto& each : node.conditions) result = product(result, with_condition(node, each));
  return result;
}

SchemaGraph::Alternatives SchemaGraph::any_of(const std::vector<SchemaId>& schemas) {
  Alternatives result;
  for (const SchemaId each : schemas) {
    const Alternatives& found = alternatives_of(each);
    result.insert(result.end(), found.begin(), found.end());
  }
  return result;
}

SchemaGraph::Alternatives SchemaGraph::one_of(SchemaId node,
                                              const std::vector<SchemaId>& branches) {
  const SchemaNode& whole = read(node);
  Alternatives context = {{}};
  if (whole.restricts) context = {{node}};
  for (const SchemaId each : whole.all) {
    const Alternatives& found = alternatives_of(each);
    if (found.size() == 1) context = product(context, found);
  }
  // Which branches may hold together.
  std::vector<std::vector<std::size_t>> rivals(branches.size());
  for (std::size_t i = 0; i < branches.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      const auto common =
          product(product(context, alternatives_of(branches[i])), alternatives_of(branches[j]));
      const bool are_apart = std::all_of(common.begin(), common.end(), [&](const SchemaSet& set) {
        return is_empty(*this, set, deepest_complement);
      });
      if (are_apart) continue;
      rivals[i].push_back(j);
      rivals[j].push_back(i);
    }
  }
  Alternatives result;
  for (std::size_t i = 0; i < branches.size(); ++i) {
    Alternatives found = alternatives_of(branches[i]);
    for (const std::size_t rival : rivals[i]) {
      const Complement others = complement(branches[rival], 0);
      if (!others.is_exact && !others.has_absences) {
        fail_schema(schema_pointer(whole.keywords.pointer, "oneOf"),
                    fmt::format("the schemas {} and {} may hold together: use anyOf, or tell them "
                                "apart by type, by a required member or by its const",
                                std::min(i, rival), std::max(i, rival)));
      }
      Alternatives apart = product(found, others.alternatives);
      found.clear();
      for (SchemaSet& set : apart) {
        if (!is_empty(*this, joined(context[0], set), 0)) found.push_back(std::move(set));
      }
    }
    result.insert(result.end(), found.begin(), found.end());
  }
  return result;
}

SchemaGraph::Alternatives SchemaGraph::with_condition(const SchemaNode& node,
                                                      const SchemaNode::Condition& condition) {
  Alternatives result = alternatives_of(condition.condition);
  if (condition.then) result = product(result, alternatives_of(*condition.then));
  const Complement others = complement(condition.condition, 0);
  if (!others.is_exact) {
    fail_schema(schema_pointer(node.keywords.pointer, "if"),
                "supported only for types, required members, bounds, enum and const");
  }
  Alternatives otherwise = others.alternatives;
  if (condition.otherwise) otherwise = product(otherwise, alternatives_of(*condition.otherwise));
  result.insert(result.end(), otherwise.begin(), otherwise.end());
  return result;
}

SchemaGraph::Alternatives SchemaGraph::product(const Alternatives& a, const Alternatives& b) {
  if (a.size() == 1 && a[0].empty()) return b;
  Alternatives result;
  for (const SchemaSet& left : a) {
    for (const SchemaSet& right : b) {
      SchemaSet set = joined(left, right);
      work(1 + set.size());
      unsigned types = all_types;
      for (const SchemaId each : set) types &= read(each).keywords.types;
      if (types != 0) result.push_back(std::move(set));
    }
  }
  sort_unique(result);
  if (result.size() > most_alternatives) {
    fail_schema("#", fmt::format("over {} combinations of alternatives (anyOf, oneOf, not, if, "
                                 "dependentRequired, dependentSchemas)",
                                 most_alternatives));
  }
  return result;
}

SchemaGraph::Complement SchemaGraph::complement(SchemaId node, int depth) {
  Complement result;
  result.alternatives = {{}};
  bool is_first = true;
  // None of the sets holds: some keyword of each does not.
  const Alternatives sets = alternatives_of(node);
  for (const SchemaSet& set : sets) {
    Complement one;
    for (const SchemaId each : set) {
      const Complement part = complement_of_keywords(each, depth);
      one.alternatives.insert(one.alternatives.end(), part.alternatives.begin(),
                              part.alternatives.end());
      one.is_exact &= part.is_exact;
      one.has_absences |= part.has_absences;
    }
    result.alternatives = product(result.alternatives, one.alternatives);
    result.is_exact &= one.is_exact;
    result.has_absences = one.has_absences && (is_first || result.has_absences);
    is_first = false;
  }
  return result;
}

SchemaGraph::Complement SchemaGraph::complement_of_keywords(SchemaId node, int depth) {
  const SchemaKeywords& own = read(node).keywords;
  Complement result;
  SchemaKeywords blank;
  blank.pointer = own.pointer;
  const auto add_case = [&](unsigned types, auto&& change) {
    SchemaKeywords made = blank;
    made.types = types;
    change(made);
    result.alternatives.push_back({add_made(std::move(made))});
  };
  constexpr unsigned number_types = integer_type | fraction_type;
  if (own.types != all_types) add_case(all_types & ~own.types, [](SchemaKeywords&) {});
  if (own.values) {
    SchemaKeywords made = blank;
    std::vector<Decimal> numbers;
    for (const SchemaJson* value : *own.values) {
      if (value->is_number()) numbers.push_back(decimal(*value));
      if (value->is_array()) made.types &= ~unsigned{array_type};
      if (value->is_object()) made.types &= ~unsigned{object_type};
      if (!value->is_number() && !value->is_structured()) made.excluded.push_back(value);
    }
    result.is_exact &= made.types == all_types;
    // Numbers lie between those of the list.
    std::sort(numbers.begin(), numbers.end(),
              [](const Decimal& a, const Decimal& b) { return compare(a, b) < 0; });
    for (std::size_t i = 0; i <= numbers.size() && !numbers.empty(); ++i) {
      add_case(number_types, [&](SchemaKeywords& each) {
        if (i > 0) each.numbers.least = NumberBound{numbers[i - 1], true};
        if (i < numbers.size()) each.numbers.most = NumberBound{numbers[i], true};
      });
    }
    if (!numbers.empty()) made.types &= ~number_types;
    result.alternatives.push_back({add_made(std::move(made))});
  }
  const auto add_bound = [&](const std::optional<NumberBound>& bound, bool is_least) {
    if (!bound) return;
    const NumberBound other = {bound->value, !bound->is_exclusive};
    add_case(number_types, [&](SchemaKeywords& each) {
      (is_least ? each.numbers.most : each.numbers.least) = other;
    });
  };
  add_bound(own.numbers.least, true);
  add_bound(own.numbers.most, false);
  const auto add_counts = [&](const CountLimits& limits, unsigned types,
                              CountLimits SchemaKeywords::*counts) {
    if (limits.least > 0) {
      add_case(types, [&](SchemaKeywords& each) { (each.*counts).most = limits.least - 1; });
    }
    if (limits.most != unlimited) {
      add_case(types, [&](SchemaKeywords& each) { (each.*counts).least = limits.most + 1; });
    }
  };
  add_counts(own.length, string_type, &SchemaKeywords::length);
  add_counts(own.items_count, array_type, &SchemaKeywords::items_count);
  for (const Expr& content : own.contents) {
    const Expr any = repeat(json_character({{0, last_code_point}}), 0);
    add_case(string_type,
             [&](SchemaKeywords& each) { each.contents = {difference(any, content)}; });
  }
  SchemaKeywords never = blank;
  never.types = 0;
  const SchemaId false_schema = add_made(std::move(never));
  const auto with_member = [&](SchemaKeywords& each, const std::string& name, SchemaId schema) {
    each.properties.emplace_back(name, schema);
    each.by_name.emplace(name, schema);
  };
  for (const std::string& name : own.required) {
    add_case(object_type, [&](SchemaKeywords& each) { with_member(each, name, false_schema); });
    result.has_absences = true;
  }
  for (const auto& [name, schema] : own.properties) {
    Complement others;
    const bool is_known = depth < deepest_complement && looks([&, each = schema] {
                            others = complement(each, depth + 1);
                            return true;
                          });
    if (!is_known) others = {};
    result.is_exact &= is_known && others.is_exact;
    for (const SchemaSet& set : others.alternatives) {
      // A complement's sets have made nodes alone; of several, a schema that refers to all.
      SchemaNode together;
      together.keywords.pointer = own.pointer;
      together.is_read = true;
      together.all = set;
      m_nodes.push_back(std::move(together));
      const SchemaId other = static_cast<SchemaId>(m_nodes.size()) - 1;
      add_case(object_type, [&, &name = name](SchemaKeywords& each) {
        with_member(each, name, other);
        each.required = {name};
      });
    }
  }
  result.is_exact &= own.numbers.multiples_of.empty() && own.prefix.empty() && !own.items &&
                     own.members.least == 0 && own.members.most == unlimited &&
                     own.key_patterns.empty() && !own.additional && !own.names &&
                     own.excluded.empty() && !own.has_unique_items;
  return result;
}

}  // namespace kvzap::grammar
