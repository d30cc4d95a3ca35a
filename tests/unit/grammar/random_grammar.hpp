// Small random grammars, and their texts by brute force.
#pragma once

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "grammar/expression.hpp"

namespace kvzap::grammar {

/// Finds where parts of one text end, by trying everything until nothing new is found.
class BruteForce {
 public:
  BruteForce(const Grammar& grammar, std::string text)
      : m_grammar(grammar), m_text(std::move(text)) {
    bool has_changed = true;
    while (has_changed) {
      has_changed = false;
      for (RuleId rule = 0; rule < static_cast<RuleId>(grammar.rules.size()); ++rule) {
        for (std::size_t begin = 0; begin <= m_text.size(); ++begin) {
          const Ends found = ends(*grammar.rules[static_cast<std::size_t>(rule)].body, begin);
          Ends& known = m_ends[{rule, begin}];
          has_changed |= found != known;
          known = found;
        }
      }
    }
  }

  bool matches() { return m_ends[{m_grammar.root, 0}].count(m_text.size()) != 0; }

 private:
  using Ends = std::set<std::size_t>;

  Ends ends(const Expression& expression, std::size_t begin) {
    using Kind = Expression::Kind;
    switch (expression.kind) {
      case Kind::nothing:
      case Kind::token:
        return {};
      case Kind::bytes:
        return begin < m_text.size() && expression.bytes[static_cast<unsigned char>(m_text[begin])]
                   ? Ends{begin + 1}
                   : Ends{};
      case Kind::text:
        return m_text.compare(begin, expression.text.size(), expression.text) == 0
                   ? Ends{begin + expression.text.size()}
                   : Ends{};
      case Kind::sequence: {
        Ends at = {begin};
        for (const Expr& part : expression.parts) at = ends_of_all(*part, at);
        return at;
      }
      case Kind::choice: {
        Ends at;
        for (const Expr& part : expression.parts) at.merge(ends(*part, begin));
        return at;
      }
      case Kind::repeat:
        return ends_of_repeat(expression, begin);
      case Kind::call:
        return m_ends[{expression.rule, begin}];
      case Kind::both:
      case Kind::difference: {
        const Ends second = ends(*expression.parts[1], begin);
        Ends at;
        for (const std::size_t end : ends(*expression.parts[0], begin)) {
          if ((second.count(end) != 0) == (expression.kind == Kind::both)) at.insert(end);
        }
        return at;
      }
    }
    return {};
  }

  Ends ends_of_all(const Expression& expression, const Ends& begins) {
    Ends at;
    for (const std::size_t begin : begins) at.merge(ends(expression, begin));
    return at;
  }

  Ends ends_of_repeat(const Expression& repeat, std::size_t begin) {
    Ends found, at = {begin};
    const auto longest =
        repeat.least + static_cast<std::int64_t>(m_text.size()) + 1;  // the rest is empty
    for (std::int64_t count = 0; count <= std::min(repeat.most, longest); ++count) {
      if (count >= repeat.least) found.insert(at.begin(), at.end());
      at = ends_of_all(*repeat.parts[0], at);
    }
    return found;
  }

  const Grammar& m_grammar;
  std::string m_text;
  std::map<std::pair<RuleId, std::size_t>, Ends> m_ends;
};

class RandomGrammar {
 public:
  explicit RandomGrammar(unsigned seed) : m_random(seed) {}

  /// Expressions over a, b and c. `rules`: how many there are to call; none: regular.
  Expr expression(int depth, int rules) {
    switch (below(depth == 0 ? 3 : 10)) {
      case 0:
        return literal(text());
      case 1: {
        ByteSet bytes;
        for (const char c : {'a', 'b', 'c'})
          bytes.set(static_cast<unsigned char>(c), below(2) == 0);
        return one_byte(bytes);
      }
      case 2:
        return rules > 0 ? call(static_cast<RuleId>(below(rules))) : literal(text());
      case 3:
      case 4:
        return sequence(parts(depth, rules));
      case 5:
      case 6:
        return choice(parts(depth, rules));
      case 7: {
        const int least = below(3);
        return repeat(expression(depth - 1, rules), least, least + below(3));
      }
      case 8:
        // Too long to be written out.
        return below(2) == 0 ? repeat(expression(depth - 1, rules), below(4), 200)
                             : repeat(expression(depth - 1, rules), below(3));
      default:
        return below(2) == 0 ? both(expression(depth - 1, 0), expression(depth - 1, 0))
                             : difference(expression(depth - 1, 0), expression(depth - 1, 0));
    }
  }

  Grammar grammar(int rules) {
    Grammar made;
    for (int i = 0; i < rules; ++i) made.add("rule" + std::to_string(i), expression(3, rules));
    return made;
  }

  std::string text() {
    std::string made;
    for (int length = below(4); length > 0; --length) made += static_cast<char>('a' + below(3));
    return made;
  }

  int below(int most) { return static_cast<int>(m_random() % static_cast<unsigned>(most)); }

 private:
  std::vector<Expr> parts(int depth, int rules) {
    std::vector<Expr> made;
    for (int count = below(4); count > 0; --count) made.push_back(expression(depth - 1, rules));
    return made;
  }

  std::mt19937 m_random;
};

}  // namespace kvzap::grammar
