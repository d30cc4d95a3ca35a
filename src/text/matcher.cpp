#include "text/matcher.hpp"

#include "text/utf8.hpp"

namespace kvzap::text {

void CharacterMatcher::find(std::string_view text, std::vector<Match>& pieces) const {
  pieces.clear();
  std::size_t covered = 0;
  for (std::size_t position = 0; position < text.size();) {
    const auto [c, length] = first_character(text.substr(position));
    if (m_kind(c)) {
      if (covered < position) pieces.push_back({covered, position, false});
      covered = position + length;
      pieces.push_back({position, covered, true});
    }
    position += length;
  }
  if (covered < text.size()) pieces.push_back({covered, text.size(), false});
}

void WordMatcher::find(std::string_view text, std::vector<Match>& pieces) const {
  enum class Kind { space, word, other };
  pieces.clear();
  Kind previous = Kind::space;
  for (std::size_t position = 0; position < text.size();) {
    const auto [c, length] = first_character(text.substr(position));
    const Kind kind = is_word(c) ? Kind::word : is_white_space(c) ? Kind::space : Kind::other;
    if (pieces.empty() || kind != previous) {
      pieces.push_back({position, position, kind != Kind::space});
    }
    position += length;
    pieces.back().end = position;
    previous = kind;
  }
}

}  // namespace kvzap::text
