// The normalizers of tokenizer.json: they rewrite a text before it is split.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "files/json_field.hpp"
#include "text/text_piece.hpp"

namespace kvzap::text {

/// A text on its way through the normalizers. `from_first`: see TextPiece.
struct NormalizedText {
  std::string text;
  std::size_t from_first;
};

class Normalizer {
 public:
  virtual ~Normalizer() = default;

  /// Rewrites a text (valid UTF-8, not empty).
  virtual void apply(NormalizedText& text, GrowthLimit& limit) const = 0;
};

/// The normalizers of a file, in the order of their application.
class Normalizers {
 public:
  /// Reads the field normalizer.
  void read(const files::JsonField& field);

  bool empty() const { return m_steps.empty(); }

  /// Throws Error if the text grows beyond the limit.
  NormalizedText apply(std::string_view text, bool at_start, GrowthLimit& limit) const;

  /// Returns the form in which an added token is found; see AddedToken.
  std::string apply(const std::string& content, const std::string& where) const;

 private:
  std::vector<std::unique_ptr<const Normalizer>> m_steps;
};

}  // namespace kvzap::text
