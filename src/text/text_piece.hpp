// The parts of a text between normalizer and model, and the memory of rewritten texts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvzap::text {

/// A part of a text on its way through the pre-tokenizers.
struct TextPiece {
  std::string_view text;
  /// The number of leading bytes that stem from the first character of the input. Metaspace with
  /// prepend_scheme "first" prepends to pieces that begin with one.
  std::size_t from_first;

  /// Returns bytes begin..end-1.
  TextPiece part(std::size_t begin, std::size_t end) const {
    return {text.substr(begin, end - begin), from_first - std::min(from_first, begin)};
  }
};

/// Bounds the bytes that normalizers and pre-tokenizers add to a text. A hostile tokenizer.json
/// could otherwise double a text in each of its steps.
class GrowthLimit {
 public:
  /// `where`: the tokenizer's name in messages.
  GrowthLimit(const std::string& where, std::size_t text_bytes);

  /// Throws Error if a growth from `before` to `after` bytes exceeds the limit.
  void require(std::size_t before, std::size_t after);

 private:
  const std::string& m_where;
  std::size_t m_left;
};

/// The last rewritten text; pieces refer to it or to the normalized text.
class RewrittenText {
 public:
  explicit RewrittenText(GrowthLimit& limit) : m_limit(limit) {}

  /// Replaces each piece by the text that rewrite(piece, buffer) appends to the buffer. `rewrite`
  /// returns from_first of the new piece.
  template <class Rewrite>
  void rewrite(std::vector<TextPiece>& pieces, Rewrite rewrite) {
    std::string buffer;
    std::vector<std::size_t> ends;
    ends.reserve(pieces.size());
    for (TextPiece& piece : pieces) {
      const std::size_t begin = buffer.size();
      piece.from_first = rewrite(std::as_const(piece), buffer);
      m_limit.require(piece.text.size(), buffer.size() - begin);
      ends.push_back(buffer.size());
    }
    m_text = std::move(buffer);
    std::size_t begin = 0;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      pieces[i].text = std::string_view(m_text).substr(begin, ends[i] - begin);
      begin = ends[i];
    }
  }

 private:
  GrowthLimit& m_limit;
  std::string m_text;
};

}  // namespace kvzap::text
