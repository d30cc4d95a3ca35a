#include "grammar/automaton.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "files/quote.hpp"

namespace kvzap::grammar {
namespace {

class Compiler {
 public:
  explicit Compiler(const Grammar& grammar) : m_grammar(grammar) {
    m_made.rules.resize(grammar.rules.size());
    m_made.root = grammar.root;
  }

  Automaton compile() {
    const RepeatRule repeat_rule = [this](const Expr& body, std::int64_t least, std::int64_t most) {
      return add_repeat(body, least, most);
    };
    for (std::size_t rule = 0; rule < m_grammar.rules.size(); ++rule) {
      const Expr& body = m_grammar.rules[rule].body;
      if (!body) {
        throw Error(fmt::format("the grammar has no rule {}",
                                files::in_quotes(m_grammar.rules[rule].name)));
      }
      add_nodes(static_cast<RuleId>(rule), automaton_of(body, repeat_rule, m_meter));
    }
    while (!m_bodies_to_add.empty()) {
      const auto [rule, body] = m_bodies_to_add.back();
      m_bodies_to_add.pop_back();
      add_nodes(rule, automaton_of(body, repeat_rule, m_meter));
    }
    check_calls();
    find_nullable();
    remove_dead_ends();
    return std::move(m_made);
  }

 private:
  RuleId add_rule() {
    m_made.rules.emplace_back();
    return static_cast<RuleId>(m_made.rules.size()) - 1;
  }

  RuleId add_repeat(const Expr& body, std::int64_t least, std::int64_t most) {
    const auto [repeat, is_new] = m_repeats.emplace(std::tuple(body.get(), least, most), 0);
    if (!is_new) return repeat->second;
    const auto [part, is_new_part] = m_bodies.emplace(body.get(), 0);
    if (is_new_part) {
      part->second = add_rule();
      m_made.rules.back().is_body = true;
      m_bodies_to_add.emplace_back(part->second, body);
    }
    const RuleId rule = add_rule();
    repeat->second = rule;
    RuleInfo& info = m_made.rules.back();
    info.is_repeat = true;
    info.body = part->second;
    info.least = least;
    info.most = most;
    info.start = static_cast<NodeIndex>(m_made.nodes.size());
    m_made.nodes.emplace_back();
    m_made.nodes.back().rule = rule;
    return rule;
  }

  void add_nodes(RuleId rule, FiniteAutomaton automaton) {
    const auto base = static_cast<NodeIndex>(m_made.nodes.size());
    m_made.rules[static_cast<std::size_t>(rule)].start = base;
    for (FiniteAutomaton::State& state : automaton.states) {
      for (auto& edge : state.bytes) edge.target += base;
      for (auto& edge : state.tokens) edge.target += base;
      for (auto& edge : state.calls) edge.target += base;
      Node node;
      node.rule = rule;
      node.is_final = state.is_final;
      node.bytes = std::move(state.bytes);
      node.tokens = std::move(state.tokens);
      node.calls = std::move(state.calls);
      m_made.nodes.push_back(std::move(node));
    }
  }

  RuleInfo& info_of(RuleId rule) { return m_made.rules[static_cast<std::size_t>(rule)]; }

  void check_calls() {
    for (const Node& node : m_made.nodes) {
      for (const auto& call : node.calls) {
        if (call.rule < 0 || static_cast<std::size_t>(call.rule) >= m_made.rules.size()) {
          throw Error("the grammar calls a rule that it does not have");
        }
      }
    }
  }

  /// Sets the flag of rules whose automaton can reach its end by calls of such rules, and, if
  /// `counts_bytes`, by bytes and tokens.
  template <class Flag>
  void find_rules(bool counts_bytes, const Flag& flag_of) {
    const std::vector<std::vector<NodeIndex>> callers = nodes_by_rule();
    bool has_changed = true, is_reversed = false;
    std::vector<char> reaches(m_made.nodes.size(), 0);
    while (has_changed) {
      has_changed = false;
      // Rules often call those after them or those before them: both orders in turns.
      is_reversed = !is_reversed;
      for (std::size_t i = 0; i < m_made.rules.size(); ++i) {
        const std::size_t rule = is_reversed ? m_made.rules.size() - 1 - i : i;
        RuleInfo& info = m_made.rules[rule];
        if (flag_of(info)) continue;
        if (info.is_repeat) {
          const bool fits = info.most == unlimited || info.least <= info.most;
          flag_of(info) = fits && (info.least == 0 || flag_of(info_of(info.body)));
        } else {
          spread(callers[rule], reaches, counts_bytes, flag_of);
          flag_of(info) = reaches[info.start] != 0;
        }
        has_changed |= static_cast<bool>(flag_of(info));
      }
    }
  }

  /// Marks nodes from which the end of their rule can be reached.
  template <class Flag>
  void spread(const std::vector<NodeIndex>& nodes, std::vector<char>& reaches, bool counts_bytes,
              const Flag& flag_of) {
    bool has_changed = true;
    while (has_changed) {
      has_changed = false;
      m_meter.add(nodes.size());
      for (auto at = nodes.rbegin(); at != nodes.rend(); ++at) {
        const Node& node = m_made.nodes[*at];
        if (reaches[*at]) continue;
        const auto leads = [&](const auto& edge) { return reaches[edge.target] != 0; };
        const auto passes = [&](const auto& call) {
          return leads(call) && flag_of(info_of(call.rule));
        };
        const bool found =
            node.is_final || std::any_of(node.calls.begin(), node.calls.end(), passes) ||
            (counts_bytes && (std::any_of(node.bytes.begin(), node.bytes.end(), leads) ||
                              std::any_of(node.tokens.begin(), node.tokens.end(), leads)));
        if (!found) continue;
        reaches[*at] = 1;
        has_changed = true;
      }
    }
  }

  std::vector<std::vector<NodeIndex>> nodes_by_rule() const {
    std::vector<std::vector<NodeIndex>> result(m_made.rules.size());
    for (NodeIndex node = 0; node < m_made.nodes.size(); ++node) {
      result[static_cast<std::size_t>(m_made.nodes[node].rule)].push_back(node);
    }
    return result;
  }

  void find_nullable() {
    find_rules(false, [](RuleInfo& info) -> bool& { return info.is_nullable; });
  }

  void remove_dead_ends() {
    std::vector<char> ends(m_made.rules.size(), 0);
    const auto flag_of = [&](RuleInfo& info) -> char& {
      return ends[static_cast<std::size_t>(&info - m_made.rules.data())];
    };
    find_rules(true, flag_of);
    if (!ends[static_cast<std::size_t>(m_made.root)]) {
      throw Error("no text matches the grammar");
    }
    std::vector<char> reaches(m_made.nodes.size(), 0);
    for (const auto& nodes : nodes_by_rule()) spread(nodes, reaches, true, flag_of);
    for (RuleInfo& info : m_made.rules) {
      // A repeat of what matches nothing has no copy.
      if (info.is_repeat && !flag_of(info_of(info.body))) info.most = 0;
    }
    const auto is_dead = [&](const auto& edge) { return !reaches[edge.target]; };
    const auto remove = [](auto& edges, const auto& is_removed) {
      edges.erase(std::remove_if(edges.begin(), edges.end(), is_removed), edges.end());
    };
    for (Node& node : m_made.nodes) {
      remove(node.bytes, is_dead);
      remove(node.tokens, is_dead);
      remove(node.calls, [&](const FiniteAutomaton::CallEdge& call) {
        return is_dead(call) || !flag_of(info_of(call.rule));
      });
      node.has_bytes_alone = !node.is_final && node.calls.empty() && !info_of(node.rule).is_repeat;
    }
  }

  const Grammar& m_grammar;
  WorkMeter m_meter;
  Automaton m_made;
  std::map<const Expression*, RuleId> m_bodies;
  std::map<std::tuple<const Expression*, std::int64_t, std::int64_t>, RuleId> m_repeats;
  std::vector<std::pair<RuleId, Expr>> m_bodies_to_add;
};

}  // namespace

Automaton compile(const Grammar& grammar) { return Compiler(grammar).compile(); }

}  // namespace kvzap::grammar
