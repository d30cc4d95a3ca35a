// The splitting of texts at matches.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "files/json_field.hpp"
#include "text/matcher.hpp"
#include "text/text_piece.hpp"

namespace kvzap::text {

/// The treatment of matches, with the names of tokenizer.json.
enum class SplitBehavior { isolated, removed, merged_with_previous, merged_with_next, contiguous };

SplitBehavior split_behavior(const files::JsonField& field);

class Splitter {
 public:
  /// `invert`: the matches are the text between those of the matcher.
  Splitter(std::unique_ptr<const Matcher> matcher, SplitBehavior behavior, bool invert)
      : m_matcher(std::move(matcher)), m_behavior(behavior), m_invert(invert) {}

  /// Appends the parts of a piece (valid UTF-8) to result. None of them is empty. `matches` is
  /// memory.
  void split(const TextPiece& piece, std::vector<Match>& matches,
             std::vector<TextPiece>& result) const;

 private:
  std::unique_ptr<const Matcher> m_matcher;
  SplitBehavior m_behavior;
  bool m_invert;
};

}  // namespace kvzap::text
