#include "grammar/live_rules.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace kvzap::grammar {
namespace {

class LiveRules {
 public:
  LiveRules(const Grammar& grammar, RuleId first)
      : m_grammar(grammar),
        m_first(static_cast<std::size_t>(first)),
        m_is_live(grammar.rules.size(), false) {
    std::fill_n(m_is_live.begin(), m_first, true);
  }

  bool reach(RuleId root) {
    find_live();
    return m_is_live[static_cast<std::size_t>(root)];
  }

 private:
  using Kind = Expression::Kind;

  /// Rules that call a rule are looked at again when it turns out to make a text.
  void find_live() {
    std::vector<std::vector<std::size_t>> callers(m_grammar.rules.size());
    std::vector<std::size_t> waiting;
    for (std::size_t rule = m_first; rule < m_grammar.rules.size(); ++rule) {
      collect_calls(*m_grammar.rules[rule].body, rule, callers);
      waiting.push_back(rule);
    }
    while (!waiting.empty()) {
      const std::size_t rule = waiting.back();
      waiting.pop_back();
      if (m_is_live[rule] || !is_live(*m_grammar.rules[rule].body)) continue;
      m_is_live[rule] = true;
      waiting.insert(waiting.end(), callers[rule].begin(), callers[rule].end());
    }
  }

  void collect_calls(const Expression& expression, std::size_t caller,
                     std::vector<std::vector<std::size_t>>& callers) const {
    if (expression.kind == Kind::call) {
      auto& all = callers[static_cast<std::size_t>(expression.rule)];
      if (all.empty() || all.back() != caller) all.push_back(caller);
    }
    if (expression.kind == Kind::both || expression.kind == Kind::difference) return;
    for (const Expr& part : expression.parts) collect_calls(*part, caller, callers);
  }

  bool is_live(const Expression& expression) const {
    const auto& parts = expression.parts;
    const auto part_is_live = [&](const Expr& part) { return is_live(*part); };
    switch (expression.kind) {
      case Kind::nothing:
        return false;
      case Kind::bytes:
        return expression.bytes.any();
      case Kind::sequence:
        return std::all_of(parts.begin(), parts.end(), part_is_live);
      case Kind::choice:
        return std::any_of(parts.begin(), parts.end(), part_is_live);
      case Kind::repeat:
        return expression.least == 0 || is_live(*parts[0]);
      case Kind::call:
        return m_is_live[static_cast<std::size_t>(expression.rule)];
      default:
        return true;
    }
  }

  const Grammar& m_grammar;
  std::size_t m_first;
  std::vector<bool> m_is_live;
};

}  // namespace

bool makes_text(const Grammar& grammar, RuleId first, RuleId root) {
  return LiveRules(grammar, first).reach(root);
}

}  // namespace kvzap::grammar
