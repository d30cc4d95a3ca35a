// Cache states by the tokens that led to them. A prompt continues from the state of a beginning.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

namespace kvzap::server {

/// The history of a sequence: token ids, and marks (negative numbers). A mark stands where more
/// than the tokens determines the cache, such as the end of a judged context. Equal keys mean equal
/// caches.
using PrefixKey = std::vector<std::int32_t>;

/// A radix tree over keys. A state is the number of a sequence, which the caller owns. A search
/// costs O(key + branches on its way), an eviction O(states). Not thread-safe.
class PrefixTree {
 public:
  PrefixTree();
  ~PrefixTree();
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;

  struct Found {
    int state = -1;           // none
    std::int64_t length = 0;  // of the beginning of the key
    /// The state can be cut back to shorter beginnings, down to this length.
    std::int64_t whole_from = 0;
    /// The state has a longer key: it is that of the beginning once it is cut back.
    bool is_cut = false;
  };
  /// The state of the longest beginning of `key` that has a state and at most `most` elements.
  /// Marks it and the states on the way to it as used.
  Found longest(const PrefixKey& key, std::int64_t most);
  /// The longest beginning of `key`, of at most `most` elements, to which a state can be cut back.
  /// Marks that state as used.
  Found longest_cut(const PrefixKey& key, std::int64_t most);
  /// Whether exactly this key has a state.
  bool contains(const PrefixKey& key) const;
  /// Sets the state of a key. Returns its earlier state, or -1. `whole_from`: the length of the
  /// shortest beginning of the key to which the state can be cut back; absent: that of the key. A
  /// spare state serves only to be cut back: use of longer keys does not count as its use.
  int insert(const PrefixKey& key, int state, std::optional<std::int64_t> whole_from = {},
             bool is_spare = false);
  /// Removes the least recently used state that is spare or that no longer key with a state
  /// continues. Returns it, or -1 if the tree is empty.
  int evict();
  /// Removes the state of exactly this key. Returns it, or -1 if there is none.
  int erase(const PrefixKey& key);
  /// Removes all states. Returns them in the order of `evict`.
  std::vector<int> clear();

  std::int64_t size() const { return m_size; }

 private:
  struct Node;

  Node* find(const PrefixKey& key) const;
  void note_used(Node* state);
  int take(Node* from);
  static void update(Node* node);

  std::unique_ptr<Node> m_root;
  std::int64_t m_size = 0;
  std::uint64_t m_clock = 0;
};

}  // namespace kvzap::server
