#include "grammar/token_trie.hpp"

#include <algorithm>
#include <numeric>

namespace kvzap::grammar {

TokenTrie::TokenTrie(const std::vector<std::string>& texts) : m_vocabulary(texts.size()) {
  for (std::size_t i = 0; i < texts.size(); ++i) {
    if (!texts[i].empty()) m_tokens.push_back(static_cast<TokenId>(i));
  }
  const auto text_of = [&](TokenId token) -> const std::string& {
    return texts[static_cast<std::size_t>(token)];
  };
  std::sort(m_tokens.begin(), m_tokens.end(), [&](TokenId a, TokenId b) {
    const int order = text_of(a).compare(text_of(b));
    return order != 0 ? order < 0 : a < b;
  });
  const auto add_node = [&](unsigned char byte, std::size_t token) {
    m_bytes.push_back(byte);
    m_ends.push_back(0);
    m_first.push_back(static_cast<std::uint32_t>(token));
  };
  add_node(0, 0);
  std::vector<NodeId> path = {0};  // to the last text
  const auto close = [&](std::size_t length) {
    for (; path.size() > length + 1; path.pop_back()) m_ends[path.back()] = size();
  };
  const std::string none;
  const std::string* last = &none;
  for (std::size_t i = 0; i < m_tokens.size(); ++i) {
    const std::string& text = text_of(m_tokens[i]);
    const auto differs = std::mismatch(text.begin(), text.end(), last->begin(), last->end());
    const auto shared = static_cast<std::size_t>(differs.first - text.begin());
    close(shared);
    for (std::size_t k = shared; k < text.size(); ++k) {
      path.push_back(size());
      add_node(static_cast<unsigned char>(text[k]), i);
    }
    last = &text;
  }
  close(0);
  m_ends[0] = size();
  m_first.push_back(static_cast<std::uint32_t>(m_tokens.size()));
}

}  // namespace kvzap::grammar
