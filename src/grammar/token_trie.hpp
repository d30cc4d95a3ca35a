// The texts of a vocabulary as a tree of bytes.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>
#include <string>
#include <vector>

namespace kvzap::grammar {

/// Nodes in the order of their texts. The root, node 0, is the empty text. What begins with the
/// text of a node lies from the node up to its `end`.
class TokenTrie {
 public:
  using NodeId = std::uint32_t;

  /// `texts`: the bytes of each token; an empty text is left out.
  explicit TokenTrie(const std::vector<std::string>& texts);

  NodeId size() const { return static_cast<NodeId>(m_bytes.size()); }
  /// The last byte of a node's text.
  unsigned char byte(NodeId node) const { return m_bytes[node]; }
  NodeId end(NodeId node) const { return m_ends[node]; }
  /// The tokens with the text of a node.
  const TokenId* tokens_begin(NodeId node) const { return m_tokens.data() + m_first[node]; }
  const TokenId* tokens_end(NodeId node) const { return m_tokens.data() + m_first[node + 1]; }
  /// Number of tokens, including those left out.
  std::size_t vocabulary() const { return m_vocabulary; }

 private:
  std::size_t m_vocabulary;
  std::vector<unsigned char> m_bytes;
  std::vector<NodeId> m_ends;
  std::vector<std::uint32_t> m_first;  // of m_tokens; one more than nodes
  std::vector<TokenId> m_tokens;       // by their texts
};

}  // namespace kvzap::grammar
