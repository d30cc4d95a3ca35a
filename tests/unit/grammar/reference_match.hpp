// Whether a grammar makes a text, by sets of places: slow, and nothing like the matcher.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "grammar/expression.hpp"

namespace kvzap::test {

/// Matches whole texts, without special tokens. Grammars may be left recursive.
class ReferenceMatch {
 public:
  using Places = std::set<std::size_t>;

  static bool matches(const grammar::Grammar& grammar, std::string_view text) {
    return ReferenceMatch(grammar, text).ends_with_all();
  }
  static bool matches(const grammar::Expr& expression, std::string_view text) {
    grammar::Grammar one;
    one.root = one.add("root", expression);
    return matches(one, text);
  }

 private:
  using Kind = grammar::Expression::Kind;

  ReferenceMatch(const grammar::Grammar& grammar, std::string_view text)
      : m_grammar(grammar), m_text(text) {}

  bool ends_with_all() {
    // Calls see what earlier rounds found, until a round finds nothing new.
    std::size_t found = 0, before = 1;
    while (found != before) {
      before = found;
      m_seen.clear();
      rule_ends(m_grammar.root, 0);
      found = 0;
      for (const auto& [start, places] : m_rules) found += places.size() + 1;
    }
    return m_rules[{m_grammar.root, 0}].count(m_text.size()) != 0;
  }

  Places rule_ends(grammar::RuleId rule, std::size_t from) {
    const std::pair<grammar::RuleId, std::size_t> start = {rule, from};
    if (m_seen.insert(start).second) {
      const Places found = ends(*m_grammar.rules.at(static_cast<std::size_t>(rule)).body, from);
      m_rules[start].insert(found.begin(), found.end());
    }
    return m_rules[start];
  }

  Places ends(const grammar::Expression& expression, const Places& from) {
    Places all;
    for (const std::size_t place : from) {
      const Places found = ends(expression, place);
      all.insert(found.begin(), found.end());
    }
    return all;
  }

  Places ends(const grammar::Expression& expression, std::size_t from) {
    const auto& parts = expression.parts;
    Places result;
    switch (expression.kind) {
      case Kind::nothing:
      case Kind::token:
        break;
      case Kind::bytes:
        if (from < m_text.size() && expression.bytes[static_cast<unsigned char>(m_text[from])]) {
          result.insert(from + 1);
        }
        break;
      case Kind::text:
        if (m_text.compare(from, expression.text.size(), expression.text) == 0) {
          result.insert(from + expression.text.size());
        }
        break;
      case Kind::sequence:
        result.insert(from);
        for (const auto& part : parts) result = ends(*part, result);
        break;
      case Kind::choice:
        for (const auto& part : parts) {
          const Places found = ends(*part, from);
          result.insert(found.begin(), found.end());
        }
        break;
      case Kind::repeat: {
        // More repetitions than this repeat a place.
        const auto rounds = static_cast<std::int64_t>(m_text.size()) + 1;
        const std::int64_t most = std::min(expression.most, expression.least + rounds);
        Places places = {from};
        for (std::int64_t count = 0; count <= most && !places.empty(); ++count) {
          if (count >= expression.least) result.insert(places.begin(), places.end());
          places = ends(*parts[0], places);
        }
        break;
      }
      case Kind::call:
        return rule_ends(expression.rule, from);
      case Kind::both:
        for (const std::size_t place : ends(*parts[0], from)) {
          if (ends(*parts[1], from).count(place) != 0) result.insert(place);
        }
        break;
      case Kind::difference:
        for (const std::size_t place : ends(*parts[0], from)) {
          if (ends(*parts[1], from).count(place) == 0) result.insert(place);
        }
        break;
    }
    return result;
  }

  const grammar::Grammar& m_grammar;
  std::string_view m_text;
  std::map<std::pair<grammar::RuleId, std::size_t>, Places> m_rules;
  std::set<std::pair<grammar::RuleId, std::size_t>> m_seen;
};

}  // namespace kvzap::test
