// Reads a text byte by byte and knows at each whether it can still match a grammar. J. Earley, "An
// efficient context-free parsing algorithm", 1970, over automata instead of productions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "grammar/automaton.hpp"

namespace kvzap::grammar {

/// A rule in progress: where its automaton is, and after how many bytes the rule began.
struct Item {
  NodeIndex node;
  std::uint32_t origin;
  std::int64_t count;  // of a repeat

  bool operator==(const Item& other) const {
    return node == other.node && origin == other.origin && count == other.count;
  }
};

class Recogniser {
 public:
  /// The origin of an item whose callers are unknown.
  static constexpr std::uint32_t unknown = std::numeric_limits<std::uint32_t>::max();

  /// Begins a text. `automaton` must outlive the recogniser.
  explicit Recogniser(const Automaton& automaton);
  /// Begins within a rule whose callers are unknown. Of a repeat, counts begin at 0 and have no
  /// bounds. `with_calls`: what the node calls may come, too.
  Recogniser(const Automaton& automaton, NodeIndex node, bool with_calls);

  /// Reads a byte, or the special token. Returns false and changes nothing if it cannot follow.
  /// Throws Error if too many rules are in progress, or a byte is too much work.
  bool read_byte(unsigned char byte);
  bool read_token(TokenId token);
  /// Continues as if the rules of items of the current set had ended after one byte more. Returns
  /// false and changes nothing if nothing can follow.
  bool leave(const std::vector<Item>& items);
  /// Forgets the last `count` bytes and tokens.
  void go_back(std::size_t count);

  /// The number of bytes and tokens so far.
  std::size_t size() const { return m_begins.size() - 1; }
  const Item* begin() const { return m_items.data() + m_begins.back(); }
  const Item* end() const { return m_items.data() + m_items.size(); }
  const Automaton& automaton() const { return m_automaton; }
  /// Whether the text so far matches.
  bool is_match() const { return m_matches.back() != 0; }
  /// Counts with which the rule with unknown callers can end here.
  const std::vector<std::int64_t>& exits() const { return m_exits; }
  /// Of a repeat with unknown callers: the least count that includes what is in progress.
  std::int64_t least_count();
  /// Items and calls looked at so far, and the work of others that was added.
  std::size_t work() const { return m_work; }
  void add_work(std::size_t work) { m_work += work; }

 private:
  const Item* calling_begin(std::size_t set) const {
    return m_calling.data() + m_calling_begins[set];
  }
  const Item* calling_end(std::size_t set) const {
    const bool is_last = set + 1 == m_calling_begins.size();
    return m_calling.data() + (is_last ? m_calling.size() : m_calling_begins[set + 1]);
  }
  void look_at(std::size_t items);
  bool is_end_of_text(const Item& item) const;
  void begin_set();
  void add(Item item);
  void close();
  void close_repeat(const Item& item);
  void close_node(const Item& item);
  void complete(RuleId rule, const Item& item);
  template <class F>
  void visit_callers(RuleId rule, std::uint32_t origin, F f);
  bool finish_set();

  const Automaton& m_automaton;
  // Items of all sets. Items that neither read nor count are dropped once they are closed.
  std::vector<Item> m_items;
  std::vector<std::uint32_t> m_begins;  // of sets
  // Items that call rules, apart: many rules may end at once, and each looks for its callers.
  std::vector<Item> m_calling;
  std::vector<std::uint32_t> m_calling_begins;  // of sets
  std::vector<char> m_matches;                  // whether the text up to a set matches
  std::vector<std::int64_t> m_exits;            // of the last set
  std::size_t m_work = 0, m_work_before = 0;    // before the last set
  // The last set by hash, once it is large.
  std::vector<std::uint32_t> m_table;
  std::size_t m_in_table = 0;
};

}  // namespace kvzap::grammar
