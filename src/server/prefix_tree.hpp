// States of sequences by the tokens that led to them: what a prompt that begins alike goes on from.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace kvzap::server {

/// What a sequence has been through: token ids, and marks (negative numbers) wherever something
/// other than the tokens decides on its cache, such as where a context ended and was judged. Equal
/// keys, equal caches.
using PrefixKey = std::vector<std::int32_t>;

/// A radix tree over such keys. A state is a number that stands for a sequence; the tree does not
/// know what it is. Costs O(key) for a search, O(states) for an eviction. Not thread-safe.
class PrefixTree {
 public:
  PrefixTree();
  ~PrefixTree();
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;

  struct Found {
    int state = -1;  // none
    std::int64_t length = 0;
  };
  /// The state of the longest beginning of `key` that has one and is not longer than `most`. It
  /// counts as used, and all on the way to it.
  Found longest(const PrefixKey& key, std::int64_t most);
  /// Whether exactly this key has a state.
  bool contains(const PrefixKey& key) const;
  /// Gives a key a state. Returns the one that it had, or -1.
  int insert(const PrefixKey& key, int state);
  /// Takes out the least recently used of those states of which no longer key goes on. Returns it,
  /// or -1 if there is none.
  int evict();
  /// Takes out all states, the longest keys first.
  std::vector<int> clear();

  std::int64_t size() const { return m_size; }

 private:
  struct Node;

  std::unique_ptr<Node> m_root;
  std::int64_t m_size = 0;
  std::uint64_t m_clock = 0;
};

}  // namespace kvzap::server
