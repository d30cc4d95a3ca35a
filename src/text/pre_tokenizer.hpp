// The pre-tokenizers of tokenizer.json: they split a normalized text before the model encodes it.
#pragma once

#include <memory>
#include <vector>

#include "files/json_field.hpp"
#include "text/text_piece.hpp"

namespace kvzap::text {

class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;

  /// Splits or rewrites the pieces (valid UTF-8, none empty).
  virtual void apply(std::vector<TextPiece>& pieces, RewrittenText& text) const = 0;
};

/// The pre-tokenizers of a file, in the order of their application.
class PreTokenizers {
 public:
  /// Reads the field pre_tokenizer. `bytes_wanted`: the model takes the bytes of a text in place of
  /// their characters in the byte alphabet, which is faster.
  void read(const files::JsonField& field, bool bytes_wanted);

  /// Returns whether the pieces consist of bytes that the byte alphabet represents.
  bool gives_bytes() const { return m_gives_bytes; }

  void apply(std::vector<TextPiece>& pieces, RewrittenText& text) const {
    for (const auto& step : m_steps) step->apply(pieces, text);
  }

 private:
  std::vector<std::unique_ptr<const PreTokenizer>> m_steps;
  bool m_gives_bytes = false;
};

}  // namespace kvzap::text
