// Small random grammars.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "grammar/expression.hpp"

namespace kvzap::grammar {

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
        const int least = below(3), more = below(3);
        return repeat(expression(depth - 1, rules), least, least + more);
      }
      case 8: {
        const bool is_long = below(2) == 0;  // too long to be written out
        const int least = below(is_long ? 4 : 3);
        return repeat(expression(depth - 1, rules), least, is_long ? 200 : unlimited);
      }
      default: {
        const bool is_both = below(2) == 0;
        const Expr first = expression(depth - 1, 0), second = expression(depth - 1, 0);
        return is_both ? both(first, second) : difference(first, second);
      }
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
