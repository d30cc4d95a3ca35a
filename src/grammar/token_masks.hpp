// Masks of the tokens that may follow in each state of a grammar. Most of a mask depends on one
// item of the recogniser alone, and is kept; only tokens that leave the item's rule are tried in
// each step. Dong et al., "XGrammar" (arXiv 2411.15100), section 3.1, has this division.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "grammar/automaton.hpp"
#include "grammar/recogniser.hpp"
#include "grammar/token_trie.hpp"

namespace kvzap::grammar {

/// What may follow a node whatever calls its rule.
struct NodeMask {
  /// A text of the trie whose bytes but the last end the rule.
  struct Exit {
    TokenTrie::NodeId text;
    std::uint32_t count;  // of a repeat
  };
  // Tokens within the rule: as a list if they are few, otherwise as bits.
  std::vector<TokenId> tokens;
  std::vector<std::uint64_t> bits;
  // Of a repeat: place i has bits for the tokens that need up to i copies; `tokens` are those that
  // need more copies than there are places, with their numbers in `counts`.
  std::vector<std::vector<std::uint64_t>> bits_by_count;
  std::vector<std::uint16_t> counts;
  std::vector<Exit> exits;  // by their last byte
  std::array<std::uint32_t, 257> first_exit{};

  std::size_t bytes() const;
};

class TokenMasks {
 public:
  TokenMasks(const Automaton& automaton, const TokenTrie& trie)
      : m_automaton(automaton), m_trie(trie) {}

  /// Bytes of the masks that are kept now.
  std::size_t bytes() const {
    const std::lock_guard<std::mutex> lock(m_mutex);
    return m_bytes;
  }
  /// Sets the bits of the tokens that may follow. `bits` has one for each token.
  void allow(Recogniser& recogniser, std::vector<std::uint64_t>& bits) const;

 private:
  void allow_items(Recogniser& recogniser, const std::vector<Item>& items, std::size_t most_work,
                   std::vector<std::uint64_t>& bits) const;
  // Add their work to that of `recogniser`.
  std::shared_ptr<const NodeMask> mask_of(NodeIndex node, Recogniser& recogniser) const;
  std::shared_ptr<const NodeMask> make_mask(NodeIndex node, Recogniser& recogniser) const;

  const Automaton& m_automaton;
  const TokenTrie& m_trie;
  mutable std::mutex m_mutex;
  mutable std::unordered_map<NodeIndex, std::shared_ptr<const NodeMask>> m_masks;
  mutable std::size_t m_bytes = 0;
};

}  // namespace kvzap::grammar
