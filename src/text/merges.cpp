#include "text/merges.hpp"

#include <functional>
#include <queue>
#include <tuple>
#include <utility>

namespace kvzap::text {

void MergeTable::set(TokenId left, TokenId right, const Merge& merge) {
  const std::uint64_t key = key_of(left, right);
  Slot& slot = m_slots[place_of(key)];
  const bool is_new = slot.merge.id < 0;
  slot = {key, merge};
  if (!is_new || 4 * ++m_count <= 3 * m_slots.size()) return;
  std::vector<Slot> old(2 * m_slots.size(), Slot{0, {0, -1}});
  old.swap(m_slots);
  for (const Slot& each : old) {
    if (each.merge.id >= 0) m_slots[place_of(each.key)] = each;
  }
}

// In n log n steps: the symbols form a linked list, and the candidate merges a heap in which
// outdated ones are skipped.
void apply_merges(std::vector<TokenId>& symbols, const MergeTable& merges) {
  struct Node {
    TokenId id;
    std::ptrdiff_t previous, next;  // -1: none
    bool removed;
  };
  struct Candidate {
    std::uint32_t rank;
    std::ptrdiff_t position;
    TokenId id;
    bool operator>(const Candidate& other) const {
      return std::tie(rank, position) > std::tie(other.rank, other.position);
    }
  };
  const auto count = static_cast<std::ptrdiff_t>(symbols.size());
  std::vector<Node> nodes(symbols.size());
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    nodes[i] = {symbols[i], i - 1, i + 1 < count ? i + 1 : -1, false};
  }
  std::vector<Candidate> candidates;
  candidates.reserve(symbols.size());
  for (std::ptrdiff_t i = 0; i + 1 < count; ++i) {
    if (const Merge* const merge = merges.find(symbols[i], symbols[i + 1])) {
      candidates.push_back({merge->rank, i, merge->id});
    }
  }
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue(
      std::greater<>{}, std::move(candidates));
  const auto push = [&](std::ptrdiff_t left) {
    const Merge* const merge = merges.find(nodes[left].id, nodes[nodes[left].next].id);
    if (merge != nullptr) queue.push({merge->rank, left, merge->id});
  };
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    Node& left = nodes[top.position];
    if (left.removed || left.next < 0) continue;
    Node& right = nodes[left.next];
    const Merge* const merge = merges.find(left.id, right.id);
    if (merge == nullptr || merge->id != top.id) continue;
    left.id = top.id;
    right.removed = true;
    left.next = right.next;
    if (left.next >= 0) nodes[left.next].previous = top.position;
    if (left.previous >= 0) push(left.previous);
    if (left.next >= 0) push(top.position);
  }
  symbols.clear();
  for (const Node& node : nodes) {
    if (!node.removed) symbols.push_back(node.id);
  }
}

}  // namespace kvzap::text
