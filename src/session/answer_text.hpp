// The text of an answer, in pieces as its tokens are drawn.
#pragma once

#include <fmt/format.h>

#include <functional>
#include <kvzap/model/tokenizer.hpp>
#include <optional>
#include <string>
#include <utility>

#include "text/marks.hpp"

namespace kvzap::session {

class AnswerText {
 public:
  /// Receives each piece, never an empty one.
  using Sink = std::function<void(const std::string&)>;

  /// `tokenizer`: null for an answer without text, or, if `shows_ids`, with the ids as its text.
  /// `stops`: the text ends before the first of these.
  AnswerText(const Tokenizer* tokenizer, bool shows_ids, Sink sink,
             std::vector<std::string> stops = {})
      : m_shows_ids(shows_ids), m_sink(std::move(sink)), m_until_stop(std::move(stops)) {
    if (tokenizer) m_decoder.emplace(*tokenizer);
  }

  void append(TokenId token) {
    if (m_decoder) {
      give(m_until_stop.append(m_decoder->append(token)));
    } else if (m_shows_ids) {
      give(fmt::format("{}{}", m_text.empty() ? "" : " ", token));
    }
  }
  /// Gives what the last token has left incomplete.
  void finish() {
    if (!m_decoder) return;
    give(m_until_stop.append(m_decoder->finish()));
    give(m_until_stop.finish());
  }
  /// Whether a stop was found.
  bool has_stopped() const { return m_until_stop.has_found(); }
  const std::string& text() const { return m_text; }

 private:
  void give(const std::string& piece) {
    if (piece.empty()) return;
    m_text += piece;
    m_sink(piece);
  }

  bool m_shows_ids;
  Sink m_sink;
  std::optional<Tokenizer::StreamDecoder> m_decoder;
  text::TextUntilMark m_until_stop;
  std::string m_text;
};

}  // namespace kvzap::session
