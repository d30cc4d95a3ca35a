#include "grammar/token_masks.hpp"

#include <algorithm>
#include <bitset>
#include <map>
#include <numeric>
#include <utility>

namespace kvzap::grammar {
namespace {

// Masks of one grammar. Beyond this they are made again when they are needed.
constexpr std::size_t most_bytes = std::size_t{32} << 20;
// Some 0.1 s of a core for what follows one state, and thrice that for a step, which waits for it.
constexpr std::size_t most_visits = 10'000'000;
constexpr std::size_t most_visits_of_step = 3 * most_visits;
// What an answer may add for each of its bytes: no grammar slows all steps down.
constexpr std::size_t visits_of_byte = 500'000;
constexpr std::int64_t most_counted = 0xFFFF;
// Most tokens need fewer copies of what repeats, such as characters.
constexpr std::size_t small_counts = 16;
constexpr std::size_t word_bits = 64;

void add_bits(const std::vector<std::uint64_t>& added, std::vector<std::uint64_t>& bits) {
  for (std::size_t i = 0; i < added.size(); ++i) bits[i] |= added[i];
}

void set_bit(std::vector<std::uint64_t>& bits, TokenId token) {
  const auto index = static_cast<std::size_t>(token);
  bits[index / word_bits] |= std::uint64_t{1} << (index % word_bits);
}

void check_work(const Recogniser& recogniser, std::size_t most) {
  if (recogniser.work() <= most) return;
  throw Error("the grammar is ambiguous: the tokens that may follow are too hard to find");
}

/// Walks the texts below `root`, and calls visit(node) for each that the recogniser can read.
/// Throws Error beyond `most` visits of the recogniser.
template <class F>
void walk(Recogniser& recogniser, const TokenTrie& trie, TokenTrie::NodeId root, std::size_t most,
          F visit) {
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
    check_work(recogniser, most);
  }
  go_up(trie.size());
}

}  // namespace

std::size_t NodeMask::bytes() const {
  return sizeof(*this) + tokens.size() * sizeof(TokenId) + bits.size() * sizeof(std::uint64_t) +
         counts.size() * sizeof(std::uint16_t) + exits.size() * sizeof(Exit) +
         bits_by_count.size() * (bits_by_count.empty() ? 0 : bits_by_count.front().size()) *
             sizeof(std::uint64_t);
}

std::shared_ptr<const NodeMask> TokenMasks::make_mask(NodeIndex node, Recogniser& asking) const {
  auto mask = std::make_shared<NodeMask>();
  const bool is_repeat =
      m_automaton.rules[static_cast<std::size_t>(m_automaton.nodes[node].rule)].is_repeat;
  const std::size_t words = (m_trie.vocabulary() + word_bits - 1) / word_bits;
  if (is_repeat) {
    mask->bits_by_count.assign(small_counts, std::vector<std::uint64_t>(words, 0));
  }
  Recogniser recogniser(m_automaton, node, is_repeat);
  const auto add_counted = [&](TokenId token, std::int64_t count) {
    if (count < static_cast<std::int64_t>(small_counts)) {
      set_bit(mask->bits_by_count[static_cast<std::size_t>(count)], token);
    } else if (count <= most_counted) {
      mask->tokens.push_back(token);
      mask->counts.push_back(static_cast<std::uint16_t>(count));
    }
  };
  walk(recogniser, m_trie, 0, most_visits, [&](TokenTrie::NodeId text) {
    const TokenId* const first = m_trie.tokens_begin(text);
    const TokenId* const last = m_trie.tokens_end(text);
    if (first != last && is_repeat) {
      const std::int64_t count = recogniser.least_count();
      std::for_each(first, last, [&](TokenId token) { add_counted(token, count); });
    } else {
      mask->tokens.insert(mask->tokens.end(), first, last);
    }
    if (recogniser.exits().empty() || m_trie.end(text) == text + 1) return;
    std::vector<std::int64_t> counts = recogniser.exits();
    std::sort(counts.begin(), counts.end());
    counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
    for (auto child = text + 1; child < m_trie.end(text); child = m_trie.end(child)) {
      for (const std::int64_t count : counts) {
        mask->exits.push_back({child, static_cast<std::uint32_t>(count)});
      }
    }
  });
  asking.add_work(recogniser.work());
  std::stable_sort(mask->exits.begin(), mask->exits.end(), [&](const auto& a, const auto& b) {
    return m_trie.byte(a.text) < m_trie.byte(b.text);
  });
  for (const NodeMask::Exit& exit : mask->exits) ++mask->first_exit[m_trie.byte(exit.text) + 1U];
  std::partial_sum(mask->first_exit.begin(), mask->first_exit.end(), mask->first_exit.begin());
  for (std::size_t i = 1; i < mask->bits_by_count.size(); ++i) {
    add_bits(mask->bits_by_count[i - 1], mask->bits_by_count[i]);
  }
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

std::shared_ptr<const NodeMask> TokenMasks::mask_of(NodeIndex node, Recogniser& recogniser) const {
  // Repeats of one body count from 0 here, so they share a mask.
  const RuleInfo& info = m_automaton.rules[static_cast<std::size_t>(m_automaton.nodes[node].rule)];
  const NodeIndex key =
      info.is_repeat ? m_automaton.rules[static_cast<std::size_t>(info.body)].start : node;
  {
    const std::lock_guard<std::mutex> lock(m_mutex);
    const auto found = m_masks.find(key);
    if (found != m_masks.end()) return found->second;
  }
  std::shared_ptr<const NodeMask> made = make_mask(node, recogniser);
  const std::lock_guard<std::mutex> lock(m_mutex);
  if (m_bytes + made->bytes() > most_bytes) {
    m_masks.clear();
    m_bytes = 0;
  }
  if (m_masks.emplace(key, made).second) m_bytes += made->bytes();
  return made;
}

/// `items`: with the same node and count, in different places of the text.
void TokenMasks::allow_items(Recogniser& recogniser, const std::vector<Item>& items,
                             std::size_t most_work, std::vector<std::uint64_t>& bits) const {
  const Item& item = items.front();
  const std::shared_ptr<const NodeMask> mask = mask_of(item.node, recogniser);
  const RuleInfo& info =
      m_automaton.rules[static_cast<std::size_t>(m_automaton.nodes[item.node].rule)];
  std::int64_t least = 0, most = unlimited;
  if (info.is_repeat) {
    const bool is_free = m_automaton.rules[static_cast<std::size_t>(info.body)].is_nullable;
    least = is_free ? 0 : info.least - item.count;
    if (info.most != unlimited) most = info.most - item.count;
    const auto place = std::min<std::int64_t>(most, small_counts - 1);
    add_bits(mask->bits_by_count[static_cast<std::size_t>(place)], bits);
    for (std::size_t i = 0; i < mask->tokens.size(); ++i) {
      if (mask->counts[i] <= most) set_bit(bits, mask->tokens[i]);
    }
  } else {
    for (const TokenId token : mask->tokens) set_bit(bits, token);
    add_bits(mask->bits, bits);
  }
  if (mask->exits.empty() || !recogniser.leave(items)) return;
  std::bitset<256> follows;
  for (const Item& next : recogniser) {
    for (const auto& edge : m_automaton.nodes[next.node].bytes) {
      for (std::size_t byte = edge.first; byte <= edge.last; ++byte) follows.set(byte);
    }
  }
  const auto allow_text = [&](TokenTrie::NodeId text) {
    std::for_each(m_trie.tokens_begin(text), m_trie.tokens_end(text),
                  [&](TokenId token) { set_bit(bits, token); });
  };
  for (std::size_t byte = 0; byte < follows.size(); ++byte) {
    const std::uint32_t first = mask->first_exit[byte], last = mask->first_exit[byte + 1];
    if (!follows[byte] || first == last) continue;
    recogniser.read_byte(static_cast<unsigned char>(byte));
    check_work(recogniser, most_work);
    for (std::uint32_t i = first; i < last; ++i) {
      const NodeMask::Exit& exit = mask->exits[i];
      if (info.is_repeat && (exit.count < least || exit.count > most)) continue;
      allow_text(exit.text);
      walk(recogniser, m_trie, exit.text, most_work, allow_text);
    }
    recogniser.go_back(1);
  }
  recogniser.go_back(1);
}

void TokenMasks::allow(Recogniser& recogniser, std::vector<std::uint64_t>& bits) const {
  const std::size_t most_work =
      most_visits_of_step + std::min(recogniser.work(), visits_of_byte * recogniser.size());
  std::map<std::pair<NodeIndex, std::int64_t>, std::vector<Item>> groups;
  for (const Item& item : recogniser) {
    const Node& node = m_automaton.nodes[item.node];
    const RuleInfo& info = m_automaton.rules[static_cast<std::size_t>(node.rule)];
    for (const auto& edge : node.tokens) set_bit(bits, edge.token);
    // What a repeat begins is a part of the repeat's mask.
    if (info.is_body && item.origin == recogniser.size()) continue;
    if (info.is_repeat ? item.count < info.most : !node.bytes.empty()) {
      groups[{item.node, item.count}].push_back(item);
    }
  }
  for (const auto& [key, items] : groups) {
    allow_items(recogniser, items, most_work, bits);
    check_work(recogniser, most_work);
  }
}

}  // namespace kvzap::grammar
