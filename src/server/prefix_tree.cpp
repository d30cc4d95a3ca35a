#include "server/prefix_tree.hpp"

#include <algorithm>
#include <limits>

namespace kvzap::server {

struct PrefixTree::Node {
  PrefixKey label;                                         // of the edge that leads here
  std::map<std::int32_t, std::unique_ptr<Node>> children;  // by the first element of their labels
  Node* parent = nullptr;
  int state = -1;
  std::int64_t whole_from = 0;  // of the state
  bool is_spare = false;
  std::uint64_t used = 0;
  // The smallest whole_from of the states here and below.
  std::int64_t least_whole = std::numeric_limits<std::int64_t>::max();

  std::int64_t own_whole() const {
    return state < 0 ? std::numeric_limits<std::int64_t>::max() : whole_from;
  }
};

namespace {

/// Number of elements that `label` and `key` from `begin` on have in common.
std::size_t common(const PrefixKey& label, const PrefixKey& key, std::size_t begin) {
  const std::size_t most = std::min(label.size(), key.size() - begin);
  std::size_t count = 0;
  while (count < most && label[count] == key[begin + count]) ++count;
  return count;
}

}  // namespace

PrefixTree::PrefixTree() : m_root(std::make_unique<Node>()) {}

PrefixTree::~PrefixTree() {
  // Without recursion: conversations make deep trees.
  std::vector<std::unique_ptr<Node>> nodes;
  nodes.push_back(std::move(m_root));
  while (!nodes.empty()) {
    const std::unique_ptr<Node> node = std::move(nodes.back());
    nodes.pop_back();
    for (auto& [first, child] : node->children) nodes.push_back(std::move(child));
  }
}

PrefixTree::Found PrefixTree::longest(const PrefixKey& key, std::int64_t most) {
  Found found;
  Node* best = nullptr;
  Node* node = m_root.get();
  for (std::size_t length = 0; length < key.size();) {
    const auto child = node->children.find(key[length]);
    if (child == node->children.end()) break;
    node = child->second.get();
    if (common(node->label, key, length) < node->label.size()) break;
    length += node->label.size();
    if (static_cast<std::int64_t>(length) > most) break;
    if (node->state < 0) continue;
    best = node;
    found = {node->state, static_cast<std::int64_t>(length), node->whole_from, false};
  }
  if (best) note_used(best);
  return found;
}

PrefixTree::Found PrefixTree::longest_cut(const PrefixKey& key, std::int64_t most) {
  struct Step {
    Node* node;
    std::int64_t shared;  // elements of the key that all keys here and below begin with
  };
  std::vector<Step> way;
  Node* node = m_root.get();
  for (std::size_t length = 0; static_cast<std::int64_t>(length) < most && length < key.size();) {
    const auto child = node->children.find(key[length]);
    if (child == node->children.end()) break;
    node = child->second.get();
    const std::size_t shared = common(node->label, key, length);
    length += shared;
    way.push_back({node, std::min(most, static_cast<std::int64_t>(length))});
    if (shared < node->label.size()) break;
  }
  for (; !way.empty(); way.pop_back()) {
    const std::int64_t shared = way.back().shared;
    node = way.back().node;
    if (node->least_whole > shared) continue;
    while (node->own_whole() > shared) {
      const auto child =
          std::find_if(node->children.begin(), node->children.end(),
                       [&](const auto& entry) { return entry.second->least_whole <= shared; });
      node = child->second.get();
    }
    note_used(node);
    return {node->state, shared, node->whole_from, true};
  }
  return {};
}

/// Marks a state and those on the way to it as used.
void PrefixTree::note_used(Node* state) {
  ++m_clock;
  for (Node* node = state; node; node = node->parent) {
    if (node == state || !node->is_spare) node->used = m_clock;
  }
}

/// Restores least_whole of a node and of those above it.
void PrefixTree::update(Node* node) {
  for (; node; node = node->parent) {
    node->least_whole = node->own_whole();
    for (const auto& [first, child] : node->children) {
      node->least_whole = std::min(node->least_whole, child->least_whole);
    }
  }
}

/// The node of a key, or null.
PrefixTree::Node* PrefixTree::find(const PrefixKey& key) const {
  Node* node = m_root.get();
  for (std::size_t length = 0; length < key.size(); length += node->label.size()) {
    const auto child = node->children.find(key[length]);
    if (child == node->children.end()) return nullptr;
    node = child->second.get();
    if (common(node->label, key, length) < node->label.size()) return nullptr;
  }
  return node;
}

bool PrefixTree::contains(const PrefixKey& key) const {
  const Node* const node = find(key);
  return node && node->state >= 0;
}

int PrefixTree::erase(const PrefixKey& key) {
  Node* const node = find(key);
  return node && node->state >= 0 ? take(node) : -1;
}

int PrefixTree::insert(const PrefixKey& key, int state, std::optional<std::int64_t> whole_from,
                       bool is_spare) {
  Node* node = m_root.get();
  for (std::size_t length = 0; length < key.size();) {
    auto& child = node->children[key[length]];
    if (!child) {
      child = std::make_unique<Node>();
      child->label.assign(key.begin() + static_cast<std::ptrdiff_t>(length), key.end());
      child->parent = node;
    }
    const std::size_t shared = common(child->label, key, length);
    if (shared < child->label.size()) {
      // Split the edge in two.
      auto middle = std::make_unique<Node>();
      const auto cut = child->label.begin() + static_cast<std::ptrdiff_t>(shared);
      middle->label.assign(child->label.begin(), cut);
      middle->parent = node;
      middle->used = child->used;
      middle->least_whole = child->least_whole;
      child->label.erase(child->label.begin(), cut);
      child->parent = middle.get();
      const std::int32_t first = child->label.front();
      middle->children[first] = std::move(child);
      child = std::move(middle);
    }
    node = child.get();
    length += shared;
  }
  const int before = node->state;
  if (before < 0) ++m_size;
  node->state = state;
  node->whole_from = whole_from.value_or(static_cast<std::int64_t>(key.size()));
  node->is_spare = is_spare;
  update(node);
  note_used(node);
  return before;
}

int PrefixTree::evict() {
  Node* oldest = nullptr;
  std::vector<Node*> nodes = {m_root.get()};
  while (!nodes.empty()) {
    Node* const node = nodes.back();
    nodes.pop_back();
    for (auto& [first, child] : node->children) nodes.push_back(child.get());
    if (node->state < 0 || (!node->children.empty() && !node->is_spare)) continue;
    if (!oldest || node->used < oldest->used) oldest = node;
  }
  return oldest ? take(oldest) : -1;
}

/// Removes the state of a node, and the nodes that are of no use any more.
int PrefixTree::take(Node* from) {
  const int state = from->state;
  from->state = -1;
  from->is_spare = false;
  --m_size;
  // Remove nodes without a state that are leaves or have a single child.
  Node* changed = from;
  for (Node* node = from; node != m_root.get() && node->state < 0;) {
    Node* const parent = node->parent;
    const std::int32_t first = node->label.front();
    changed = parent;
    if (node->children.empty()) {
      parent->children.erase(first);
    } else if (node->children.size() == 1) {
      std::unique_ptr<Node> child = std::move(node->children.begin()->second);
      child->label.insert(child->label.begin(), node->label.begin(), node->label.end());
      child->parent = parent;
      parent->children[first] = std::move(child);
      break;
    } else {
      changed = node;
      break;
    }
    node = parent;
  }
  update(changed);
  return state;
}

std::vector<int> PrefixTree::clear() {
  std::vector<int> states;
  for (int state = evict(); state >= 0; state = evict()) states.push_back(state);
  return states;
}

}  // namespace kvzap::server
