#include "text/added_tokens.hpp"

#include <algorithm>
#include <iterator>

namespace kvzap::text {

bool AddedTokenMatcher::insert(std::string_view text, const AddedToken& token) {
  if (!m_tokens.emplace(text, token).second) return false;
  m_longest = std::max(m_longest, text.size());
  m_first[static_cast<unsigned char>(text.front())] = true;
  return true;
}

std::pair<const AddedToken*, std::size_t> AddedTokenMatcher::longest(std::string_view text,
                                                                     std::size_t position) const {
  if (!m_first[static_cast<unsigned char>(text[position])]) return {nullptr, 0};
  // Find the last token that is not after the text in the table's order. Either the text begins
  // with it, or the two differ at some character. In that case a token that begins the text is no
  // longer than their common prefix.
  std::string_view rest = text.substr(position, m_longest);
  while (!rest.empty()) {
    const auto after = m_tokens.upper_bound(rest);
    if (after == m_tokens.begin()) break;
    const auto& [candidate, token] = *std::prev(after);
    const std::size_t longer = std::min(candidate.size(), rest.size());
    const auto common = static_cast<std::size_t>(
        std::mismatch(rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(longer),
                      candidate.begin())
            .first -
        rest.begin());
    if (common == candidate.size()) return {&token, common};
    rest = rest.substr(0, common);
  }
  return {nullptr, 0};
}

}  // namespace kvzap::text
