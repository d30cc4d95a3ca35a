#include "grammar/token_masks.hpp"

#include <algorithm>
#include <array>
#include <utility>

namespace kvzap::grammar {
namespace {

// Masks of one grammar. Beyond this they are made again when they are needed.
constexpr std::size_t most_bytes = std::size_t{64} << 20;
// Some 0.5 s of a core.
constexpr std::size_t most_visits = 50'000'000;
constexpr std::uint16_t never = 0xFFFF;
constexpr std::size_t word_bits = 64;

void set_bit(std::vector<std::uint64_t>& bits, TokenId token) {
  const auto index = static_cast<std::size_t>(token);
  bits[index / word_bits] |= std::uint64_t{1} << (index % word_bits);
}

/// Walks the texts below `root`, and calls visit(node) for each that the recogniser can read.
template <class F>
void walk(Recogniser& recogniser, const TokenTrie& trie, TokenTrie::NodeId root, F visit) {
  const std::size_t most = recogniser.work() + most_visits;
  std::vector<TokenTrie::NodeId> path;
  const auto go_up = [&](TokenTrie::NodeId node) {
    for (; !path.empty() && node >= trie.end(path.back()); path.pop_back()) recogniser.go_back(1);
  };
  TokenTrie::NodeId node = root + 1;
  while (node < trie.end(root)) {
    go_up(node);
    if (!recogniser.read_byte(trie.byte(node))) {
      node = trie.end(node);
      continue;
    }
    path.push_back(node);
    visit(node);
    ++node;
    if (recogniser.work() > most) {
      throw Error("the grammar is ambiguous: the tokens that may follow are too hard to find");
    }
  }
  go_up(trie.size());
}

}  // namespace

std::size_t NodeMask::bytes() const {
  return sizeof(*this) + tokens.size() * sizeof(TokenId) + bits.size() * sizeof(std::uint64_t) +
         counts.size() * sizeof(std::uint16_t) + exits.size() * sizeof(Exit);
}

std::shared_ptr<const NodeMask> TokenMasks::make_mask(NodeIndex node) const {
  auto mask = std::make_shared<NodeMask>();
  const bool is_repeat =
      m_automaton.rules[static_cast<std::size_t>(m_automaton.nodes[node].rule)].is_repeat;
  Recogniser recogniser(m_automaton, node, is_repeat);
  walk(recogniser, m_trie, 0, [&](TokenTrie::NodeId text) {
    const TokenId* const first = m_trie.tokens_begin(text);
    const TokenId* const last = m_trie.tokens_end(text);
    if (first != last) {
      mask->tokens.insert(mask->tokens.end(), first, last);
      if (is_repeat) {
        const std::int64_t count = std::min<std::int64_t>(recogniser.least_count(), never);
        mask->counts.insert(mask->counts.end(), static_cast<std::size_t>(last - first),
                            static_cast<std::uint16_t>(count));
      }
    }
    if (recogniser.exits().empty() || m_trie.end(text) == text + 1) return;
    std::vector<std::int64_t> counts = recogniser.exits();
    std::sort(counts.begin(), counts.end());
    counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
    for (const std::int64_t count : counts) mask->exits.push_back({text, count});
  });
  const std::size_t words = (m_trie.vocabulary() + word_bits - 1) / word_bits;
  if (!is_repeat && mask->tokens.size() > 2 * words) {
    mask->bits.assign(words, 0);
    for (const TokenId token : mask->tokens) set_bit(mask->bits, token);
    mask->tokens.clear();
  }
  mask->tokens.shrink_to_fit();
  mask->counts.shrink_to_fit();
  mask->exits.shrink_to_fit();
  return mask;
}

std::shared_ptr<const NodeMask> TokenMasks::mask_of(NodeIndex node) const {
  // Repeats of one body count from 0 here, so they share a mask.
  const RuleInfo& info = m_automaton.rules[static_cast<std::size_t>(m_automaton.nodes[node].rule)];
  const NodeIndex key =
      info.is_repeat ? m_automaton.rules[static_cast<std::size_t>(info.body)].start : node;
  {
    const std::lock_guard<std::mutex> lock(m_mutex);
    const auto found = m_masks.find(key);
    if (found != m_masks.end()) return found->second;
  }
  std::shared_ptr<const NodeMask> made = make_mask(node);
  const std::lock_guard<std::mutex> lock(m_mutex);
  if (m_bytes + made->bytes() > most_bytes) {
    m_masks.clear();
    m_bytes = 0;
  }
  if (m_masks.emplace(key, made).second) m_bytes += made->bytes();
  return made;
}

void TokenMasks::allow_item(Recogniser& recogniser, const Item& item,
                            std::vector<std::uint64_t>& bits) const {
  const std::shared_ptr<const NodeMask> mask = mask_of(item.node);
  const RuleInfo& info =
      m_automaton.rules[static_cast<std::size_t>(m_automaton.nodes[item.node].rule)];
  std::int64_t least = 0, most = unlimited;
  if (info.is_repeat) {
    const bool is_free = m_automaton.rules[static_cast<std::size_t>(info.body)].is_nullable;
    least = is_free ? 0 : info.least - item.count;
    if (info.most != unlimited) most = info.most - item.count;
    for (std::size_t i = 0; i < mask->tokens.size(); ++i) {
      if (mask->counts[i] <= most && mask->counts[i] != never) set_bit(bits, mask->tokens[i]);
    }
  } else {
    for (const TokenId token : mask->tokens) set_bit(bits, token);
    for (std::size_t i = 0; i < mask->bits.size(); ++i) bits[i] |= mask->bits[i];
  }
  if (mask->exits.empty() || !recogniser.leave(item)) return;
  // Most exits lead nowhere: their tokens continue with bytes that cannot follow.
  std::array<bool, 256> follows{};
  for (const Item& next : recogniser) {
    for (const auto& edge : m_automaton.nodes[next.node].bytes) {
      std::fill(follows.begin() + edge.first, follows.begin() + edge.last + 1, true);
    }
  }
  for (const NodeMask::Exit& exit : mask->exits) {
    if (info.is_repeat && (exit.count < least || exit.count > most)) continue;
    for (auto child = exit.text + 1; child < m_trie.end(exit.text); child = m_trie.end(child)) {
      if (!follows[m_trie.byte(child)]) continue;
      recogniser.read_byte(m_trie.byte(child));
      const auto allow_text = [&](TokenTrie::NodeId text) {
        std::for_each(m_trie.tokens_begin(text), m_trie.tokens_end(text),
                      [&](TokenId token) { set_bit(bits, token); });
      };
      allow_text(child);
      walk(recogniser, m_trie, child, allow_text);
      recogniser.go_back(1);
    }
  }
  recogniser.go_back(1);
}

void TokenMasks::allow(Recogniser& recogniser, std::vector<std::uint64_t>& bits) const {
  // `leave` may move the items.
  const std::vector<Item> items(recogniser.begin(), recogniser.end());
  for (const Item& item : items) {
    const Node& node = m_automaton.nodes[item.node];
    const RuleInfo& info = m_automaton.rules[static_cast<std::size_t>(node.rule)];
    for (const auto& edge : node.tokens) set_bit(bits, edge.token);
    // What a repeat begins is a part of the repeat's mask.
    if (info.is_body && item.origin == recogniser.size()) continue;
    if (info.is_repeat ? item.count < info.most : !node.bytes.empty()) {
      allow_item(recogniser, item, bits);
    }
  }
}

}  // namespace kvzap::grammar
