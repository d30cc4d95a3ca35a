#include "grammar/live_rules.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace kvzap::grammar {
namespace {

class LiveRules {
 public:
  LiveRules(const Grammar& grammar, RuleId first)
      : grammar_(grammar),
        first_(static_cast<std::size_t>(first)),
        is_live_(grammar.rules.size(), false) {
    std::fill_n(is_live_.begin(), first_, true);
  }

  bool reach(RuleId root) {
    find_live();
    return is_live_[static_cast<std::size_t>(root)];
  }

 private:
  using Kind = Expression::Kind;

  /// Rules that call a rule are looked at again when it turns out to make a text.
  void find_live() {
    std::vector<std::vector<std::size_t>> callers(grammar_.rules.size());
    std::vector<std::size_t> waiting;
    for (std::size_t rule = first_; rule < grammar_.rules.size(); ++rule) {
      collect_calls(*grammar_.rules[rule].body, rule, callers);
      waiting.push_back(rule);
    }
    while (!waiting.empty()) {
      const std::size_t rule = waiting.back();
      waiting.pop_back();
      if (is_live_[rule] || !is_live(*grammar_.rules[rule].body)) continue;
      is_live_[rule] = true;
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
        return is_live_[static_cast<std::size_t>(expression.rule)];
      default:
        return true;
    }
  }

  const Grammar& grammar_;
  std::size_t first_;
  std::vector<bool> is_live_;
};

}  // namespace

bool makes_text(const Grammar& grammar, RuleId first, RuleId root) {
  return LiveRules(grammar, first).reach(root);
}

}  // namespace kvzap::grammar
