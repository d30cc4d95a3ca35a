// The merges of byte-pair encoding.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>
#include <unordered_map>
#include <vector>

namespace kvzap::text {

/// The result of merging two symbols, and the rank of the merge.
struct Merge {
  std::uint32_t rank;
  TokenId id;
};

/// Merges, indexed by pair_key of their symbols.
using MergeTable = std::unordered_map<std::uint64_t, Merge>;

inline std::uint64_t pair_key(TokenId left, TokenId right) {
  return std::uint64_t{static_cast<std::uint32_t>(left)} << 32 | static_cast<std::uint32_t>(right);
}

/// Applies merges to the symbols, lowest rank first and leftmost among equals.
void apply_merges(std::vector<TokenId>& symbols, const MergeTable& merges);

}  // namespace kvzap::text
