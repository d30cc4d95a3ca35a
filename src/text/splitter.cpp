#include "text/splitter.hpp"

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>

namespace kvzap::text {

void Splitter::split(const TextPiece& piece, std::vector<Match>& matches,
                     std::vector<TextPiece>& result) const {
  m_matcher->find(piece.text, matches);
  if (m_invert) {
    for (Match& match : matches) match.is_match = !match.is_match;
  }
  if (m_behavior == SplitBehavior::merged_with_next) {
    std::reverse(matches.begin(), matches.end());
  }
  std::size_t parts = 0;  // the parts take the places of matches
  bool previous = false;
  for (const Match match : matches) {
    const bool merge = m_behavior == SplitBehavior::contiguous
                           ? match.is_match == previous
                           : (m_behavior == SplitBehavior::merged_with_previous ||
                              m_behavior == SplitBehavior::merged_with_next) &&
                                 match.is_match && !previous;
    previous = match.is_match;
    if (m_behavior == SplitBehavior::removed && match.is_match) continue;
    if (merge && parts > 0) {
      Match& last = matches[parts - 1];
      last.begin = std::min(last.begin, match.begin);
      last.end = std::max(last.end, match.end);
    } else {
      matches[parts++] = match;
    }
  }
  matches.resize(parts);
  if (m_behavior == SplitBehavior::merged_with_next) {
    std::reverse(matches.begin(), matches.end());
  }
  for (const Match& part : matches) {
    if (part.begin < part.end) result.push_back(piece.part(part.begin, part.end));
  }
}

SplitBehavior split_behavior(const files::JsonField& field) {
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
