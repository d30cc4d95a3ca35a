// The documents of a RULER question: those with the answer, among others.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "eval/ruler.hpp"

namespace kvzap::eval {

// Returns the end of a piece at which a document may be cut: a word, or a part of a very long word.
inline std::size_t end_of_piece(std::string_view text, std::size_t begin) {
  constexpr std::size_t longest = 32;
  std::size_t end = text.find_first_of(" \t\r\n", begin + 1);
  if (end == std::string_view::npos) end = text.size();
  if (end - begin <= longest) return end;
  end = begin + longest;
  while (end > begin + 1 && (static_cast<unsigned char>(text[end]) & 0xC0u) == 0x80u) --end;
  return end;
}

inline std::int64_t count_pieces(std::string_view text) {
  std::int64_t count = 0;
  for (std::size_t end = 0; end < text.size(); ++count) end = end_of_piece(text, end);
  return count;
}

inline std::string_view first_pieces(std::string_view text, std::int64_t count) {
  std::size_t end = 0;
  for (; count > 0 && end < text.size(); --count) end = end_of_piece(text, end);
  return text.substr(0, end);
}

/// A question's documents among others, in random order. The last added document may be cut.
class DocumentMix {
 public:
  DocumentMix(const QuestionFile& file, const QuestionFile::Question& question, RowRandom random)
      : m_file(file), m_question(question), m_random(random) {
    for (const std::uint32_t document : question.documents)
      m_needed.push_back({m_random.bits(), document});
  }

  /// Returns the documents with `words` pieces of other documents, which repeat from the first one
  /// if they run out.
  std::string text(std::int64_t pieces) {
    if (pieces > 0 && m_others.empty()) order_others();
    std::vector<Placed> placed = m_needed;
    std::vector<std::string_view> texts;
    for (const auto& needed : m_needed) texts.push_back(m_file.documents[needed.document]);
    for (std::size_t i = 0; pieces > 0; ++i) {
      if (i == m_drawn.size()) {
        const std::uint32_t document = m_others[i % m_others.size()];
        m_drawn.push_back({m_random.bits(), document});
        m_pieces.push_back(count_pieces(m_file.documents[document]));
      }
      placed.push_back(m_drawn[i]);
      const std::string_view whole = m_file.documents[m_drawn[i].document];
      texts.push_back(m_pieces[i] <= pieces ? whole : first_pieces(whole, pieces));
      pieces -= m_pieces[i];
    }
    std::vector<std::size_t> order(placed.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(),
              [&](std::size_t a, std::size_t b) { return placed[a].key < placed[b].key; });
    std::string text = "The documents to answer a question from are these:\n\n";
    for (std::size_t i = 0; i < order.size(); ++i) {
      text += fmt::format("Document {}:\n{}\n\n", i + 1, texts[order[i]]);
    }
    return text;
  }

 private:
  struct Placed {
    std::uint64_t key;  // determines the order of documents
    std::uint32_t document;
  };

  /// Draws on demand: many questions are only tested for their shortest length.
  void order_others() {
    std::vector<char> is_taken(m_file.documents.size(), 0);
    for (const auto& needed : m_needed) is_taken[needed.document] = 1;
    // As in RULER, the rest of the article comes first: it is the harder distractor.
    if (m_question.article) {
      for (const std::uint32_t other : m_file.articles[*m_question.article]) {
        if (is_taken[other] == 0) m_others.push_back(other);
        is_taken[other] = 1;
      }
    }
    const std::size_t related = m_others.size();
    m_others = m_random.sample(std::move(m_others), related);
    std::vector<std::uint32_t> rest;
    for (std::uint32_t i = 0; i < m_file.documents.size(); ++i) {
      if (is_taken[i] == 0) rest.push_back(i);
    }
    m_random.shuffle(rest);
    m_others.insert(m_others.end(), rest.begin(), rest.end());
    if (m_others.empty()) m_others = m_question.documents;
  }

  const QuestionFile& m_file;
  const QuestionFile::Question& m_question;
  RowRandom m_random;
  std::vector<Placed> m_needed;
  std::vector<std::uint32_t> m_others;
  std::vector<Placed> m_drawn;  // other documents, drawn as far as needed
  std::vector<std::int64_t> m_pieces;
};

}  // namespace kvzap::eval
