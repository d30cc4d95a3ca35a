#include "grammar/recogniser.hpp"

#include <algorithm>
#include <utility>

namespace kvzap::grammar {
namespace {

// Grammars that people write have some ten rules in progress. Right recursion ends as many rules at
// once as the text has bytes.
constexpr std::size_t most_items = 65'536;
constexpr std::size_t most_kept = 4'000'000;  // items of all sets: 64 MB
// Of one set. Where many rules end at once, each may have many callers.
constexpr std::size_t most_work_of_set = 2'000'000;  // some 20 ms
constexpr std::size_t largest_searched = 24;         // larger sets have a table
constexpr std::uint32_t no_item = std::numeric_limits<std::uint32_t>::max();

std::size_t hash_of(const Item& item) {
  std::uint64_t hash = (std::uint64_t{item.node} << 32) ^ item.origin;
  hash =
      (hash ^ static_cast<std::uint64_t>(item.count) * 0x9E3779B97F4A7C15U) * 0xBF58476D1CE4E5B9U;
  return static_cast<std::size_t>(hash ^ (hash >> 31));
}

[[noreturn]] void refuse_as_ambiguous() {
  throw Error("the grammar is ambiguous: a text may be read in thousands of ways");
}

}  // namespace

Recogniser::Recogniser(const Automaton& automaton) : m_automaton(automaton) {
  begin_set();
  add({automaton.rules[static_cast<std::size_t>(automaton.root)].start, 0, 0});
  close();
}

Recogniser::Recogniser(const Automaton& automaton, NodeIndex node, bool with_calls)
    : m_automaton(automaton) {
  begin_set();
  add({node, unknown, 0});
  if (with_calls) close();
  m_exits.clear();
}

void Recogniser::begin_set() {
  m_begins.push_back(static_cast<std::uint32_t>(m_items.size()));
  m_calling_begins.push_back(static_cast<std::uint32_t>(m_calling.size()));
  m_matches.push_back(0);
  m_in_table = 0;
  m_work_before = m_work;
}

void Recogniser::add(Item item) {
  const std::size_t begin = m_begins.back(), size = m_items.size() - begin;
  if (size < largest_searched) {
    if (std::find(this->begin(), end(), item) != end()) return;
    m_items.push_back(item);
    return;
  }
  if (size >= most_items || begin + m_calling.size() > most_kept) {
    refuse_as_ambiguous();
  }
  if (m_table.size() < 4 * (size + 1) || m_in_table == 0) {
    m_table.assign(std::max<std::size_t>(256, 8 * size), no_item);
    m_in_table = 0;
  }
  const auto insert = [&](std::uint32_t index, const Item& value) {
    std::size_t slot = hash_of(value) % m_table.size();
    for (; m_table[slot] != no_item; slot = (slot + 1) % m_table.size()) {
      if (m_items[m_table[slot]] == value) return false;
    }
    m_table[slot] = index;
    return true;
  };
  for (; m_in_table < size; ++m_in_table) {
    const std::size_t index = begin + m_in_table;
    insert(static_cast<std::uint32_t>(index), m_items[index]);
  }
  if (!insert(static_cast<std::uint32_t>(m_items.size()), item)) return;
  m_items.push_back(item);
  ++m_in_table;
}

/// Counts work. Throws Error if a set is too much.
void Recogniser::look_at(std::size_t items) {
  m_work += items;
  if (m_work - m_work_before > most_work_of_set) refuse_as_ambiguous();
}

/// Calls f(target) for each item that called `rule` when `origin` bytes had been read, where
/// `target` follows the call.
template <class F>
void Recogniser::visit_callers(RuleId rule, std::uint32_t origin, F f) {
  for (const Item* at = calling_begin(origin); at != calling_end(origin); ++at) {
    const Node& node = m_automaton.nodes[at->node];
    look_at(1 + node.calls.size());
    const RuleInfo& info = m_automaton.rules[static_cast<std::size_t>(node.rule)];
    if (info.is_repeat) {
      if (info.body != rule) continue;
      if (at->origin == unknown) {
        f(Item{at->node, at->origin, at->count + 1});
      } else if (at->count < info.most) {
        const std::int64_t highest = info.most == unlimited ? info.least : info.most;
        f(Item{at->node, at->origin, std::min(at->count + 1, highest)});
      }
      continue;
    }
    for (const auto& call : node.calls) {
      if (call.rule == rule) f(Item{call.target, at->origin, 0});
    }
  }
}

void Recogniser::complete(RuleId rule, const Item& item) {
  if (item.origin == unknown) {
    m_exits.push_back(item.count);
    return;
  }
  // Calls of rules that match the empty text are passed where they are made.
  if (item.origin == size()) return;
  // `add` may move the items.
  std::vector<Item> targets;
  visit_callers(rule, item.origin, [&](const Item& target) { targets.push_back(target); });
  for (const Item& target : targets) add(target);
}

void Recogniser::close_repeat(const Item& item) {
  const RuleId rule = m_automaton.nodes[item.node].rule;
  const RuleInfo& info = m_automaton.rules[static_cast<std::size_t>(rule)];
  const RuleInfo& body = m_automaton.rules[static_cast<std::size_t>(info.body)];
  const bool has_bounds = item.origin != unknown;
  // A body that matches the empty text fills up any count.
  const std::int64_t least = has_bounds && !body.is_nullable ? info.least : 0;
  if (item.count >= least) complete(rule, item);
  if (!has_bounds || item.count < info.most) {
    add({body.start, static_cast<std::uint32_t>(size()), 0});
  }
}

void Recogniser::close_node(const Item& item) {
  const Node& node = m_automaton.nodes[item.node];
  if (node.is_final) complete(node.rule, item);
  for (const auto& call : node.calls) {
    const RuleInfo& callee = m_automaton.rules[static_cast<std::size_t>(call.rule)];
    add({callee.start, static_cast<std::uint32_t>(size()), 0});
    if (callee.is_nullable) add({call.target, item.origin, 0});
  }
}

bool Recogniser::is_end_of_text(const Item& item) const {
  const Node& node = m_automaton.nodes[item.node];
  if (node.rule != m_automaton.root || item.origin != 0) return false;
  const RuleInfo& root = m_automaton.rules[static_cast<std::size_t>(m_automaton.root)];
  return root.is_repeat ? item.count >= root.least || root.is_nullable : node.is_final;
}

/// Adds what follows from the items of the last set without a byte.
void Recogniser::close() {
  m_exits.clear();
  m_in_table = 0;
  const std::size_t begin = m_begins.back();
  for (std::size_t i = begin; i < m_items.size(); ++i) {
    look_at(1);
    const Item item = m_items[i];
    const Node& node = m_automaton.nodes[item.node];
    const bool is_repeat = m_automaton.rules[static_cast<std::size_t>(node.rule)].is_repeat;
    if (is_repeat || !node.calls.empty()) m_calling.push_back(item);
    if (is_end_of_text(item)) m_matches.back() = 1;
    if (is_repeat) {
      close_repeat(item);
    } else {
      close_node(item);
    }
  }
  const auto is_done = [&](const Item& item) {
    const Node& node = m_automaton.nodes[item.node];
    return node.bytes.empty() && node.tokens.empty() &&
           !m_automaton.rules[static_cast<std::size_t>(node.rule)].is_repeat;
  };
  m_items.erase(
      std::remove_if(m_items.begin() + static_cast<std::ptrdiff_t>(begin), m_items.end(), is_done),
      m_items.end());
}

bool Recogniser::finish_set() {
  if (m_begins.back() == m_items.size()) {
    m_begins.pop_back();
    m_calling_begins.pop_back();
    m_matches.pop_back();
    return false;
  }
  close();
  return true;
}

bool Recogniser::read_byte(unsigned char byte) {
  const std::size_t first = m_begins.back(), last = m_items.size();
  begin_set();
  if (last == first + 1) {
    // Within a text in quotes this is the only case.
    const NodeIndex* const next = m_automaton.nodes[m_items[first].node].next(byte);
    if (next && m_automaton.nodes[*next].has_bytes_alone) {
      m_items.push_back({*next, m_items[first].origin, 0});
      m_exits.clear();
      ++m_work;
      return true;
    }
  }
  for (std::size_t i = first; i < last; ++i) {
    const NodeIndex* const next = m_automaton.nodes[m_items[i].node].next(byte);
    if (next) add({*next, m_items[i].origin, 0});
  }
  return finish_set();
}

bool Recogniser::read_token(TokenId token) {
  const std::size_t first = m_begins.back(), last = m_items.size();
  begin_set();
  for (std::size_t i = first; i < last; ++i) {
    for (const auto& edge : m_automaton.nodes[m_items[i].node].tokens) {
      if (edge.token == token) add({edge.target, m_items[i].origin, 0});
    }
  }
  return finish_set();
}

bool Recogniser::leave(const std::vector<Item>& items) {
  m_work_before = m_work;
  std::vector<Item> targets;
  for (const Item& item : items) {
    if (item.origin == unknown) continue;
    visit_callers(m_automaton.nodes[item.node].rule, item.origin,
                  [&](const Item& target) { targets.push_back(target); });
  }
  begin_set();
  for (const Item& target : targets) add(target);
  return finish_set();
}

void Recogniser::go_back(std::size_t count) {
  const std::size_t kept = m_begins.size() - count;
  m_items.resize(m_begins[kept]);
  m_begins.resize(kept);
  m_calling.resize(m_calling_begins[kept]);
  m_calling_begins.resize(kept);
  m_matches.resize(kept);
  m_exits.clear();
}

std::int64_t Recogniser::least_count() {
  m_work_before = m_work;
  std::int64_t least = unlimited;
  // Rules in progress and those that called them, up to the repeat.
  std::vector<std::pair<RuleId, std::uint32_t>> rules;
  const auto reach = [&](const Item& item) {
    if (item.origin == unknown) {
      least = std::min(least, item.count);
      return;
    }
    const std::pair rule(m_automaton.nodes[item.node].rule, item.origin);
    look_at(rules.size());
    if (std::find(rules.begin(), rules.end(), rule) == rules.end()) rules.push_back(rule);
  };
  for (const Item* at = begin(); at != end(); ++at) {
    if (at->origin != size()) reach(*at);  // others are called by these
  }
  for (std::size_t i = 0; i < rules.size(); ++i) {
    const auto [rule, origin] = rules[i];
    visit_callers(rule, origin, reach);
  }
  return least;
}

}  // namespace kvzap::grammar
