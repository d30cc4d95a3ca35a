#include "text/splitter.hpp"

#include <algorithm>
#include <map>
#include <string>

namespace kvzap::text {

void Splitter::split(const TextPiece& piece, std::vector<TextPiece>& result) const {
  std::vector<Match> matches = m_matcher->find(piece.text);
  if (m_invert) {
    for (Match& match : matches) match.is_match = !match.is_match;
  }
  if (m_behavior == SplitBehavior::merged_with_next) {
    std::reverse(matches.begin(), matches.end());
  }
  std::vector<Match> parts;
  bool previous = false;
  for (const Match& match : matches) {
    const bool merge = m_behavior == SplitBehavior::contiguous
                           ? match.is_match == previous
                           : (m_behavior == SplitBehavior::merged_with_previous ||
                              m_behavior == SplitBehavior::merged_with_next) &&
                                 match.is_match && !previous;
    previous = match.is_match;
    if (m_behavior == SplitBehavior::removed && match.is_match) continue;
    if (merge && !parts.empty()) {
      parts.back().begin = std::min(parts.back().begin, match.begin);
      parts.back().end = std::max(parts.back().end, match.end);
    } else {
      parts.push_back(match);
    }
  }
  if (m_behavior == SplitBehavior::merged_with_next) {
    std::reverse(parts.begin(), parts.end());
  }
  for (const Match& part : parts) {
    if (part.begin < part.end) result.push_back(piece.part(part.begin, part.end));
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
