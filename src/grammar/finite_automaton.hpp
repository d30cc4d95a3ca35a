// Finite automata of expressions: one state follows each byte, token or call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "grammar/expression.hpp"

namespace kvzap::grammar {

/// A deterministic automaton. State 0 is the first.
struct FiniteAutomaton {
  struct ByteEdge {
    unsigned char first, last;
    std::uint32_t target;
  };
  struct TokenEdge {
    TokenId token;
    std::uint32_t target;
  };
  struct CallEdge {
    RuleId rule;
    std::uint32_t target;
  };
  struct State {
    std::vector<ByteEdge> bytes;  // ascending, without overlap
    std::vector<TokenEdge> tokens;
    std::vector<CallEdge> calls;
    bool is_final = false;
  };
  std::vector<State> states;
};

/// Bounds the work for one grammar.
class WorkMeter {
 public:
  /// Throws Error if a grammar is larger than any that fits its purpose.
  void add(std::size_t work);

 private:
  std::size_t m_work = 0;
};

/// Returns the rule that repeats an expression, which calls to it replace.
using RepeatRule = std::function<RuleId(const Expr& body, std::int64_t least, std::int64_t most)>;

/// Returns an automaton of the expression. Long repeats become calls of `repeat_rule`. Throws Error
/// if `both` or `difference` have calls or tokens in them.
FiniteAutomaton automaton_of(const Expr& expression, const RepeatRule& repeat_rule,
                             WorkMeter& meter);

}  // namespace kvzap::grammar
