#include "text/pre_tokenizer.hpp"

#include <algorithm>
#include <map>
#include <string>

namespace kvzap::text {

void Splitter::split(std::string_view text, std::vector<std::string_view>& result) const {
  std::vector<Match> matches = m_pattern.find(text);
  if (m_invert) {
    for (Match& match : matches) match.is_match = !match.is_match;
  }
  if (m_behavior == SplitBehavior::merged_with_next) {
    std::reverse(matches.begin(), matches.end());
  }
  std::vector<Match> pieces;
  bool previous = false;
  for (const Match& match : matches) {
    const bool merge = m_behavior == SplitBehavior::contiguous
                           ? match.is_match == previous
                           : (m_behavior == SplitBehavior::merged_with_previous ||
                              m_behavior == SplitBehavior::merged_with_next) &&
                                 match.is_match && !previous;
    previous = match.is_match;
    if (m_behavior == SplitBehavior::removed && match.is_match) continue;
    if (merge && !pieces.empty()) {
      pieces.back().begin = std::min(pieces.back().begin, match.begin);
      pieces.back().end = std::max(pieces.back().end, match.end);
    } else {
      pieces.push_back(match);
    }
  }
  if (m_behavior == SplitBehavior::merged_with_next) {
    std::reverse(pieces.begin(), pieces.end());
  }
  for (const Match& piece : pieces) {
    if (piece.begin < piece.end)
      result.push_back(text.substr(piece.begin, piece.end - piece.begin));
  }
}

SplitBehavior split_behavior(const base::JsonField& field) {
  static const std::map<std::string, SplitBehavior> names = {
      {"Isolated", SplitBehavior::isolated},
      {"Removed", SplitBehavior::removed},
      {"MergedWithPrevious", SplitBehavior::merged_with_previous},
      {"MergedWithNext", SplitBehavior::merged_with_next},
      {"Contiguous", SplitBehavior::contiguous}};
  const auto found = names.find(field.string());
  if (found == names.end()) {
    field.fail("Isolated, Removed, MergedWithPrevious, MergedWithNext or Contiguous");
  }
  return found->second;
}

}  // namespace kvzap::text
