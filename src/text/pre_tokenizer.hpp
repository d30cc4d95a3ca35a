// The splitting of texts by pre-tokenizers.
#pragma once

#include <string_view>
#include <utility>
#include <vector>

#include "base/json_field.hpp"
#include "text/pattern.hpp"

namespace kvzap::text {

/// The treatment of a pattern's matches, with the names of tokenizer.json.
enum class SplitBehavior { isolated, removed, merged_with_previous, merged_with_next, contiguous };

SplitBehavior split_behavior(const base::JsonField& field);

class Splitter {
 public:
  /// `invert`: the matches are the text between those of the pattern.
  Splitter(Pattern pattern, SplitBehavior behavior, bool invert)
      : m_pattern(std::move(pattern)), m_behavior(behavior), m_invert(invert) {}

  /// Appends the pieces of text (valid UTF-8) to result.
  void split(std::string_view text, std::vector<std::string_view>& result) const;

 private:
  Pattern m_pattern;
  SplitBehavior m_behavior;
  bool m_invert;
};

}  // namespace kvzap::text
