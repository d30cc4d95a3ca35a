// Finds the parts of a text that a pre-tokenizer or normalizer treats.
#pragma once

#include <utf8proc.h>

#include <cstddef>
#include <string_view>
#include <vector>

namespace kvzap::text {

/// A piece of a text, in bytes: a match, or the text between two matches.
struct Match {
  std::size_t begin, end;
  bool is_match;
};

class Matcher {
 public:
  virtual ~Matcher() = default;

  /// Replaces `pieces` by the matches in a text (valid UTF-8) and the text between them, in order.
  virtual void find(std::string_view text, std::vector<Match>& pieces) const = 0;
};

/// Matches each single character of a kind.
class CharacterMatcher : public Matcher {
 public:
  using Kind = bool (*)(utf8proc_int32_t);
  explicit CharacterMatcher(Kind kind) : m_kind(kind) {}
  void find(std::string_view text, std::vector<Match>& pieces) const override;

 private:
  Kind m_kind;
};

/// Matches words (\w+) and runs of other characters that are no white space ([^\w\s]+).
class WordMatcher : public Matcher {
 public:
  void find(std::string_view text, std::vector<Match>& pieces) const override;
};

}  // namespace kvzap::text
