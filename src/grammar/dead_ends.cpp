#include "grammar/dead_ends.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace kvzap::grammar {
namespace {

class DeadEnds {
 public:
  DeadEnds(Grammar& grammar, RuleId first)
      : grammar_(grammar),
        first_(static_cast<std::size_t>(first)),
        is_live_(grammar.rules.size(), false) {
    std::fill_n(is_live_.begin(), first_, true);
  }

  bool remove(RuleId root) {
    find_live();
    for (std::size_t rule = first_; rule < grammar_.rules.size(); ++rule) {
      Expr& body = grammar_.rules[rule].body;
      body = is_live_[rule] ? cleaned(body) : nothing();
    }
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
      waiting.push_back(grammar_.rules.size() - 1 - (rule - first_));  // the last ones first
    }
    std::reverse(waiting.begin(), waiting.end());
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

  Expr cleaned(const Expr& expression) const {
    if (!is_live(*expression)) return nothing();
    const auto& parts = expression->parts;
    switch (expression->kind) {
      case Kind::sequence:
      case Kind::choice: {
        std::vector<Expr> kept;
        bool is_same = true;
        for (const Expr& part : parts) {
          Expr clean = cleaned(part);
          is_same &= clean == part;
          // All parts of a sequence are live.
          if (clean->kind != Kind::nothing) kept.push_back(std::move(clean));
        }
        if (is_same) return expression;
        return expression->kind == Kind::sequence ? sequence(std::move(kept))
                                                  : choice(std::move(kept));
      }
      case Kind::repeat: {
        Expr part = cleaned(parts[0]);
        if (part == parts[0]) return expression;
        if (part->kind == Kind::nothing) return empty();
        return repeat(std::move(part), expression->least, expression->most);
      }
      default:
        return expression;
    }
  }

  Grammar& grammar_;
  std::size_t first_;
  std::vector<bool> is_live_;
};

}  // namespace

bool remove_dead_ends(Grammar& grammar, RuleId first, RuleId root) {
  return DeadEnds(grammar, first).remove(root);
}

}  // namespace kvzap::grammar
