#include "grammar/finite_automaton.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <unordered_map>
#include <utility>

namespace kvzap::grammar {
namespace {

using Kind = Expression::Kind;
using StateId = std::uint32_t;

constexpr std::size_t most_work = 30'000'000;  // some 0.3 s
// Work of a state, which has some 150 bytes: a grammar has up to 2 million, or 300 MB.
constexpr std::size_t work_of_state = 15;
// A repeat of up to this many states is written out, because states are faster than counters.
constexpr std::int64_t longest_inline = 128;

/// The number of states of an expression, about.
class Sizes {
 public:
  std::int64_t operator()(const Expr& expression) {
    const auto found = m_sizes.find(expression.get());
    if (found != m_sizes.end()) return found->second;
    std::int64_t size = 1 + static_cast<std::int64_t>(expression->text.size());
    for (const Expr& part : expression->parts) size = std::min(most, size + (*this)(part));
    if (expression->kind == Kind::repeat) {
      const std::int64_t count =
          expression->most == unlimited ? expression->least + 1 : expression->most;
      size = count > most / size ? most : std::max<std::int64_t>(1, count * size);
    }
    m_sizes.emplace(expression.get(), size);
    return size;
  }

 private:
  static constexpr std::int64_t most = std::int64_t{1} << 40;
  std::unordered_map<const Expression*, std::int64_t> m_sizes;
};

/// An automaton with several edges for a byte, and edges without one.
struct Nondeterministic {
  struct State {
    std::vector<FiniteAutomaton::ByteEdge> bytes;
    std::vector<std::pair<TokenId, StateId>> tokens;
    std::vector<std::pair<RuleId, StateId>> calls;
    std::vector<StateId> empty;
  };
  std::vector<State> states;
  StateId final = 0;
};

FiniteAutomaton determinised(const Nondeterministic& source, WorkMeter& meter);
FiniteAutomaton product(const FiniteAutomaton& a, const FiniteAutomaton& b, bool is_difference,
                        WorkMeter& meter);

class Builder {
 public:
  Builder(const RepeatRule& repeat_rule, WorkMeter& meter)
      : m_repeat_rule(repeat_rule), m_meter(meter) {}

  FiniteAutomaton build(const Expr& expression) {
    const StateId first = add_state();
    m_made.final = add_state();
    connect(expression, first, m_made.final);
    return determinised(m_made, m_meter);
  }

 private:
  StateId add_state() {
    m_meter.add(work_of_state);
    m_made.states.emplace_back();
    return static_cast<StateId>(m_made.states.size()) - 1;
  }

  void connect(const Expr& expression, StateId from, StateId to) {
    m_meter.add(1);
    Nondeterministic::State& state = m_made.states[from];
    switch (expression->kind) {
      case Kind::nothing:
        return;
      case Kind::bytes:
        add_bytes(state, expression->bytes, to);
        return;
      case Kind::text:
        return connect_text(expression->text, from, to);
      case Kind::token:
        state.tokens.emplace_back(expression->token, to);
        return;
      case Kind::call:
        state.calls.emplace_back(expression->rule, to);
        return;
      case Kind::choice:
        for (const Expr& part : expression->parts) connect(part, from, to);
        return;
      case Kind::sequence:
        return connect_sequence(expression->parts, from, to);
      case Kind::repeat:
        return connect_repeat(*expression, from, to);
      case Kind::both:
      case Kind::difference:
        return connect_product(*expression, from, to);
    }
  }

  static void add_bytes(Nondeterministic::State& state, const ByteSet& bytes, StateId to) {
    for (unsigned first = 0; first < bytes.size(); ++first) {
      if (!bytes[first]) continue;
      unsigned last = first;
      while (last + 1 < bytes.size() && bytes[last + 1]) ++last;
      state.bytes.push_back(
          {static_cast<unsigned char>(first), static_cast<unsigned char>(last), to});
      first = last;
    }
  }

  void connect_text(const std::string& text, StateId from, StateId to) {
    if (text.empty()) m_made.states[from].empty.push_back(to);
    for (std::size_t i = 0; i < text.size(); ++i) {
      const StateId next = i + 1 == text.size() ? to : add_state();
      const auto byte = static_cast<unsigned char>(text[i]);
      m_made.states[from].bytes.push_back({byte, byte, next});
      from = next;
    }
  }

  void connect_sequence(const std::vector<Expr>& parts, StateId from, StateId to) {
    if (parts.empty()) m_made.states[from].empty.push_back(to);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const StateId next = i + 1 == parts.size() ? to : add_state();
      connect(parts[i], from, next);
      from = next;
    }
  }

  void connect_repeat(const Expression& repeat, StateId from, StateId to) {
    const Expr& body = repeat.parts.front();
    const bool has_end = repeat.most != unlimited;
    if (has_end && repeat.least > repeat.most) return;
    const std::int64_t copies = has_end ? repeat.most : repeat.least;
    const std::int64_t size = m_sizes(body);
    const bool is_short = copies <= 1 || copies <= longest_inline / size;
    if (!is_short && m_repeat_rule) {
      m_made.states[from].calls.emplace_back(m_repeat_rule(body, repeat.least, repeat.most), to);
      return;
    }
    // Loops get a state of their own: a choice beside one must not enter it.
    StateId at = add_state();
    m_made.states[from].empty.push_back(at);
    for (std::int64_t i = 0; i < copies; ++i) {
      if (i >= repeat.least) m_made.states[at].empty.push_back(to);
      const StateId next = add_state();
      connect(body, at, next);
      at = next;
    }
    if (!has_end) connect(body, at, at);
    m_made.states[at].empty.push_back(to);
  }

  void connect_product(const Expression& expression, StateId from, StateId to) {
    // Repeats are written out, since products have no counters.
    std::array<FiniteAutomaton, 2> parts;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      parts[i] = Builder({}, m_meter).build(expression.parts[i]);
      for (const FiniteAutomaton::State& state : parts[i].states) {
        if (!state.calls.empty() || !state.tokens.empty()) {
          throw Error("a grammar cannot intersect what calls rules");
        }
      }
    }
    const FiniteAutomaton made =
        product(parts[0], parts[1], expression.kind == Kind::difference, m_meter);
    const auto base = static_cast<StateId>(m_made.states.size());
    for (std::size_t i = 0; i < made.states.size(); ++i) add_state();
    m_made.states[from].empty.push_back(base);
    for (std::size_t i = 0; i < made.states.size(); ++i) {
      Nondeterministic::State& state = m_made.states[base + i];
      for (const auto& edge : made.states[i].bytes) {
        state.bytes.push_back({edge.first, edge.last, base + edge.target});
      }
      if (made.states[i].is_final) state.empty.push_back(to);
    }
  }

  const RepeatRule& m_repeat_rule;
  WorkMeter& m_meter;
  Sizes m_sizes;
  Nondeterministic m_made;
};

/// Subsets of states, numbered in the order in which they are found.
class Subsets {
 public:
  Subsets(const Nondeterministic& source, WorkMeter& meter)
      : m_source(source), m_meter(meter), m_marks(source.states.size(), 0) {}

  /// The number of the subset that `states` reach without a byte.
  StateId number_of(std::vector<StateId> states) {
    close(states);
    const auto [found, is_new] =
        m_numbers.emplace(std::move(states), static_cast<StateId>(m_found.size()));
    if (is_new) {
      m_meter.add(work_of_state);
      m_found.push_back(&found->first);
    }
    return found->second;
  }
  std::size_t size() const { return m_found.size(); }
  const std::vector<StateId>& operator[](std::size_t i) const { return *m_found[i]; }

 private:
  void close(std::vector<StateId>& states) {
    ++m_mark;
    std::size_t kept = 0;
    for (std::size_t i = 0; i < states.size(); ++i) {
      if (m_marks[states[i]] != m_mark) states[kept++] = states[i];
      m_marks[states[i]] = m_mark;
    }
    states.resize(kept);
    for (std::size_t i = 0; i < states.size(); ++i) {
      for (const StateId next : m_source.states[states[i]].empty) {
        if (m_marks[next] == m_mark) continue;
        m_marks[next] = m_mark;
        states.push_back(next);
      }
    }
    std::sort(states.begin(), states.end());
    m_meter.add(states.size());
  }

  const Nondeterministic& m_source;
  WorkMeter& m_meter;
  std::vector<std::uint32_t> m_marks;
  std::uint32_t m_mark = 0;
  std::map<std::vector<StateId>, StateId> m_numbers;
  std::vector<const std::vector<StateId>*> m_found;
};

/// Adds the byte edges of a subset.
void add_byte_edges(const Nondeterministic& source, std::size_t index, Subsets& subsets,
                    FiniteAutomaton::State& state, WorkMeter& meter) {
  std::array<std::vector<StateId>, 256> targets;
  for (const StateId member : subsets[index]) {
    for (const auto& edge : source.states[member].bytes) {
      meter.add(edge.last - edge.first + std::size_t{1});
      for (std::size_t byte = edge.first; byte <= edge.last; ++byte) {
        targets[byte].push_back(edge.target);
      }
    }
  }
  std::map<std::vector<StateId>, StateId> numbers;
  for (std::size_t byte = 0; byte < targets.size(); ++byte) {
    if (targets[byte].empty()) continue;
    auto found = numbers.find(targets[byte]);
    if (found == numbers.end()) {
      found = numbers.emplace(targets[byte], subsets.number_of(targets[byte])).first;
    }
    const auto value = static_cast<unsigned char>(byte);
    if (!state.bytes.empty() && state.bytes.back().target == found->second &&
        state.bytes.back().last + 1U == byte) {
      state.bytes.back().last = value;
    } else {
      state.bytes.push_back({value, value, found->second});
    }
  }
}

FiniteAutomaton determinised(const Nondeterministic& source, WorkMeter& meter) {
  FiniteAutomaton made;
  Subsets subsets(source, meter);
  subsets.number_of({0});
  for (std::size_t i = 0; i < subsets.size(); ++i) {
    FiniteAutomaton::State state;
    std::map<TokenId, std::vector<StateId>> tokens;
    std::map<RuleId, std::vector<StateId>> calls;
    for (const StateId member : subsets[i]) {
      if (member == source.final) state.is_final = true;
      for (const auto& [token, target] : source.states[member].tokens) {
        tokens[token].push_back(target);
      }
      for (const auto& [rule, target] : source.states[member].calls) calls[rule].push_back(target);
    }
    add_byte_edges(source, i, subsets, state, meter);
    for (auto& [token, targets] : tokens) {
      state.tokens.push_back({token, subsets.number_of(std::move(targets))});
    }
    for (auto& [rule, targets] : calls) {
      state.calls.push_back({rule, subsets.number_of(std::move(targets))});
    }
    made.states.push_back(std::move(state));
  }
  return made;
}

constexpr StateId no_state = std::numeric_limits<StateId>::max();

std::array<StateId, 256> table_of(const FiniteAutomaton& automaton, StateId state) {
  std::array<StateId, 256> table;
  table.fill(no_state);
  if (state == no_state) return table;
  for (const auto& edge : automaton.states[state].bytes) {
    for (std::size_t byte = edge.first; byte <= edge.last; ++byte) table[byte] = edge.target;
  }
  return table;
}

FiniteAutomaton product(const FiniteAutomaton& a, const FiniteAutomaton& b, bool is_difference,
                        WorkMeter& meter) {
  FiniteAutomaton made;
  std::map<std::pair<StateId, StateId>, StateId> numbers = {{{0, 0}, 0}};
  std::vector<std::pair<StateId, StateId>> pairs = {{0, 0}};
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    meter.add(256);
    const auto [first, second] = pairs[i];
    FiniteAutomaton::State state;
    const bool is_in_b = second != no_state && b.states[second].is_final;
    state.is_final = a.states[first].is_final && is_in_b != is_difference;
    const auto next_a = table_of(a, first), next_b = table_of(b, second);
    for (std::size_t byte = 0; byte < next_a.size(); ++byte) {
      if (next_a[byte] == no_state || (!is_difference && next_b[byte] == no_state)) continue;
      const auto pair = std::pair(next_a[byte], next_b[byte]);
      const auto [found, is_new] = numbers.emplace(pair, static_cast<StateId>(pairs.size()));
      if (is_new) pairs.push_back(pair);
      const auto value = static_cast<unsigned char>(byte);
      if (!state.bytes.empty() && state.bytes.back().target == found->second &&
          state.bytes.back().last + 1U == byte) {
        state.bytes.back().last = value;
      } else {
        state.bytes.push_back({value, value, found->second});
      }
    }
    made.states.push_back(std::move(state));
  }
  return made;
}

}  // namespace

void WorkMeter::add(std::size_t work) {
  m_work += work;
  if (m_work > most_work) {
    throw Error("the grammar is too large: its automaton would have millions of states");
  }
}

FiniteAutomaton automaton_of(const Expr& expression, const RepeatRule& repeat_rule,
                             WorkMeter& meter) {
  return Builder(repeat_rule, meter).build(expression);
}

}  // namespace kvzap::grammar
