#include "text/added_tokens.hpp"

namespace kvzap::detail {

bool AddedTokenMatcher::insert(std::string_view text, const AddedToken& token) {
  std::uint32_t node = 0;
  for (const char c : text) {
    const auto [edge, is_new] = m_edges.try_emplace(key(node, c), m_token_at.size());
    if (is_new) m_token_at.push_back(none);
    node = edge->second;
  }
  if (m_token_at[node] != none) return false;
  m_token_at[node] = m_tokens.size();
  m_tokens.push_back(token);
  m_first[static_cast<unsigned char>(text.front())] = true;
  return true;
}

std::pair<const AddedToken*, std::size_t> AddedTokenMatcher::longest(std::string_view text,
                                                                     std::size_t position) const {
  std::pair<const AddedToken*, std::size_t> best{nullptr, 0};
  if (!m_first[static_cast<unsigned char>(text[position])]) return best;
  std::uint32_t node = 0;
  for (std::size_t i = position; i < text.size(); ++i) {
    const auto edge = m_edges.find(key(node, text[i]));
    if (edge == m_edges.end()) break;
    node = edge->second;
    if (m_token_at[node] != none) best = {&m_tokens[m_token_at[node]], i + 1 - position};
  }
  return best;
}

}  // namespace kvzap::detail
