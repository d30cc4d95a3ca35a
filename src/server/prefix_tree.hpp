// Cache states by the tokens that led to them. A prompt continues from the state of a beginning.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace kvzap::server {

/// The history of a sequence: token ids, and marks (negative numbers). A mark stands where more
/// than the tokens determines the cache, such as the end of a judged context. Equal keys mean equal
/// caches.
using PrefixKey = std::vector<std::int32_t>;

/// A radix tree over keys. A state is the number of a sequence, which the caller owns. A search
/// costs O(key), an eviction O(states). Not thread-safe.
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
  /// The state of the longest beginning of `key` that has a state and at most `most` elements.
  /// Marks it and the states on the way to it as used.
  Found longest(const PrefixKey& key, std::int64_t most);
  /// Whether exactly this key has a state.
  bool contains(const PrefixKey& key) const;
  /// Sets the state of a key. Returns its earlier state, or -1.
  int insert(const PrefixKey& key, int state);
  /// Removes the least recently used state that no longer key with a state continues. Returns it,
  /// or -1 if the tree is empty.
  int evict();
  /// Removes all states. Returns them, longest keys first.
  std::vector<int> clear();

  std::int64_t size() const { return m_size; }

 private:
  struct Node;

  std::unique_ptr<Node> m_root;
  std::int64_t m_size = 0;
  std::uint64_t m_clock = 0;
};

}  // namespace kvzap::server
