// The merges of byte-pair encoding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <kvzap/core/types.hpp>
#include <vector>

namespace kvzap::text {

/// The result of merging two symbols, and the rank of the merge.
struct Merge {
  std::uint32_t rank;
  TokenId id;
};

/// Merges, found by their symbols.
class MergeTable {
 public:
  MergeTable() : m_slots(2, Slot{0, {0, -1}}) {}

  /// Adds a merge, or replaces that of the same symbols.
  void set(TokenId left, TokenId right, const Merge& merge);

  /// Returns the merge of two symbols; null if there is none.
  const Merge* find(TokenId left, TokenId right) const {
    const Slot& slot = m_slots[place_of(key_of(left, right))];
    return slot.merge.id < 0 ? nullptr : &slot.merge;
  }

 private:
  struct Slot {
    std::uint64_t key;
    Merge merge;  // its id is negative in empty slots
  };

  static std::uint64_t key_of(TokenId left, TokenId right) {
    return std::uint64_t{static_cast<std::uint32_t>(left)} << 32 |
           static_cast<std::uint32_t>(right);
  }

  /// Returns the index of the slot of a key, or of the empty one that it would take.
  std::size_t place_of(std::uint64_t key) const {
    const std::size_t mask = m_slots.size() - 1;
    std::uint64_t hash = (key ^ key >> 29) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 32;
    std::size_t place = hash & mask;
    while (m_slots[place].merge.id >= 0 && m_slots[place].key != key) place = (place + 1) & mask;
    return place;
  }

  std::vector<Slot> m_slots;  // a power of two, at most three quarters of them taken
  std::size_t m_count = 0;
};

/// Applies merges to the symbols, lowest rank first and leftmost among equals.
void apply_merges(std::vector<TokenId>& symbols, const MergeTable& merges);

}  // namespace kvzap::text
