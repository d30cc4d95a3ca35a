#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "eval/ruler.hpp"
#include "eval/words.hpp"
#include "files/plain_text.hpp"

namespace kvzap::eval {
namespace {

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

bool is_end_of_sentence(std::string_view word) {
  static const std::vector<std::string_view> closing = {"\"", "'", ")", "]", "\u201d", "\u2019"};
  static const std::vector<std::string_view> ends = {".", "!", "?", "\u3002", "\uff01", "\uff1f"};
  for (bool again = true; again;) {
    again = false;
    for (const auto mark : closing) {
      if (!ends_with(word, mark)) continue;
      word.remove_suffix(mark.size());
      again = true;
    }
  }
  return std::any_of(ends.begin(), ends.end(),
                     [&](std::string_view end) { return ends_with(word, end); });
}

}  // namespace

Prose::Prose(std::string_view text, std::string name) : m_name(std::move(name)) {
  // Words without any end of a sentence are cut after this number of words.
  constexpr std::size_t longest_sentence = 100;
  constexpr std::size_t longest_piece = 32;
  constexpr std::string_view spaces = " \t\r\n\v\f";
  const auto add = [&](std::string_view piece) {
    if (m_sentences.empty() || m_ends_sentence.back() != 0) m_sentences.push_back(pieces());
    m_text += piece;
    m_ends.push_back(m_text.size());
    m_ends_sentence.push_back(static_cast<char>(is_end_of_sentence(piece) ||
                                                pieces() - m_sentences.back() >= longest_sentence));
  };
  for (std::size_t begin = text.find_first_not_of(spaces); begin != std::string_view::npos;) {
    const std::size_t end = std::min(text.find_first_of(spaces, begin), text.size());
    std::string_view word = text.substr(begin, end - begin);
    m_text += ' ';
    while (word.size() > longest_piece) {
      std::size_t cut = longest_piece;
      while ((static_cast<unsigned char>(word[cut]) & 0xC0u) == 0x80u) --cut;
      add(word.substr(0, cut));
      word.remove_prefix(cut);
    }
    add(word);
    begin = text.find_first_not_of(spaces, end);
  }
  // The last word ends a sentence, because the text starts again after it. Otherwise a short text
  // without a full stop would be one endless sentence, and all needles would be at its ends.
  if (!m_ends_sentence.empty()) m_ends_sentence.back() = 1;
}

Prose Prose::built_in() {
  constexpr std::size_t words = 120000;
  return {made_up_prose(words), "built-in"};
}

Prose Prose::of_file(const std::filesystem::path& file) {
  constexpr std::uintmax_t max_bytes = std::uintmax_t{256} << 20;
  const std::string text = files::read_plain_text(file.string(), "", max_bytes);
  Prose prose(text, file.filename().string());
  if (prose.m_ends.empty()) {
    throw Error(fmt::format("{}: expected text, found not a word", file.string()));
  }
  return prose;
}

std::string Prose::with_needles(std::uint64_t first, std::int64_t words,
                                const std::vector<std::string>& needles,
                                const std::vector<double>& depths) const {
  const std::size_t begin = m_sentences[first % m_sentences.size()];
  const auto count = static_cast<std::size_t>(words);
  const auto at = [&](std::size_t i) { return (begin + i) % pieces(); };
  std::size_t sentences = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (i + 1 == count || m_ends_sentence[at(i)] != 0) ++sentences;
  }
  std::string text;
  std::size_t sentence = 0, needle = 0;
  const auto add_needles = [&] {
    while (needle < needles.size() &&
           static_cast<std::size_t>(depths[needle] * static_cast<double>(sentences)) <= sentence) {
      if (!text.empty()) text += ' ';
      text += needles[needle++];
    }
  };
  bool is_first = true;
  for (std::size_t i = 0; i < count; ++i) {
    if (is_first) add_needles();
    const std::size_t piece = at(i);
    const std::size_t start = piece == 0 ? 0 : m_ends[piece - 1];
    std::string_view bytes = std::string_view(m_text).substr(start, m_ends[piece] - start);
    if (text.empty()) {
      bytes.remove_prefix(bytes.front() == ' ' ? 1 : 0);
    } else if (is_first && bytes.front() != ' ') {
      text += ' ';  // after a needle, within a word that was cut
    }
    text += bytes;
    is_first = m_ends_sentence[piece] != 0;
    if (is_first || i + 1 == count) ++sentence;
  }
  add_needles();
  return text;
}

}  // namespace kvzap::eval
