// SentencePiece's table of normalized characters (the normalizer Precompiled).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "files/json_field.hpp"

namespace kvzap::text {

/// A double-array trie (Darts-clone) from character sequences to places in a list of texts, each of
/// which ends with a NUL byte.
class PrecompiledNormalizer {
 public:
  /// `charsmap`: a text in base64. Throws Error if it is malformed.
  explicit PrecompiledNormalizer(const files::JsonField& charsmap);

  /// Returns the normalized form of valid UTF-8. It replaces each grapheme cluster of at most 5
  /// bytes, or each character of longer ones, whose beginning the table has.
  std::string operator()(std::string_view text) const;

 private:
  // Returns the text for the shortest entry that `part` begins with.
  std::optional<std::string_view> replacement(std::string_view part) const;
  void append(std::string& result, std::string_view cluster) const;

  std::vector<std::uint32_t> m_units;
  std::string m_texts;
};

}  // namespace kvzap::text
