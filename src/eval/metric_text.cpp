#include "eval/metric_text.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <set>
#include <utility>

#include "text/utf8.hpp"

namespace kvzap::eval {
namespace {

// Limit on the words of a sentence in rouge_l: the table for two sentences must fit in memory, even
// if an answer repeats one word to its end.
constexpr std::size_t max_sentence_words = 8192;

bool is_python_letter(char32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
      return true;
    default:
      return false;
  }
}

bool is_cased(char32_t c) {
  const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(c));
  return category == UTF8PROC_CATEGORY_LU || category == UTF8PROC_CATEGORY_LL ||
         category == UTF8PROC_CATEGORY_LT;
}

// Unicode's Case_Ignorable: marks and signs within a word.
bool is_case_ignorable(char32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_SK:
      return true;
    default:
      return std::u32string_view(
                 U"'.:\u00b7\u0387\u055f\u05f4\u2018\u2019\u2024\u2027\ufe13"
                 U"\ufe52\ufe55\uff07\uff0e\uff1a")
                 .find(c) != std::u32string_view::npos;
  }
}

// Small sigma has another form at the end of a word (Unicode's Final_Sigma).
bool ends_cased_word(std::u32string_view text, std::size_t at) {
  std::size_t before = at, after = at + 1;
  while (before > 0 && is_case_ignorable(text[before - 1])) --before;
  while (after < text.size() && is_case_ignorable(text[after])) ++after;
  return before > 0 && is_cased(text[before - 1]) &&
         !(after < text.size() && is_cased(text[after]));
}

bool is_ascii_punctuation(char32_t c) {
  return (c >= 0x21 && c <= 0x2F) || (c >= 0x3A && c <= 0x40) || (c >= 0x5B && c <= 0x60) ||
         (c >= 0x7B && c <= 0x7E);
}

// Characters that InfiniteBench and LongBench remove from Chinese answers.
bool is_chinese_punctuation(char32_t c) {
  constexpr std::array<std::pair<char32_t, char32_t>, 15> ranges = {{{0x2013, 0x2014},
                                                                     {0x2018, 0x2019},
                                                                     {0x201B, 0x201F},
                                                                     {0x2026, 0x2027},
                                                                     {0x3001, 0x3003},
                                                                     {0x300B, 0x3011},
                                                                     {0x3014, 0x301F},
                                                                     {0x3030, 0x3030},
                                                                     {0x303E, 0x303F},
                                                                     {0xFE4F, 0xFE4F},
                                                                     {0xFF01, 0xFF0D},
                                                                     {0xFF0F, 0xFF0F},
                                                                     {0xFF1A, 0xFF20},
                                                                     {0xFF3B, 0xFF40},
                                                                     {0xFF5B, 0xFF64}}};
  return std::any_of(ranges.begin(), ranges.end(),
                     [c](const auto& range) { return c >= range.first && c <= range.second; });
}

// Returns the runs of characters for which `is_inside` is true.
template <class IsInside>
std::vector<std::u32string> character_runs_of(std::u32string_view text, IsInside&& is_inside) {
  std::vector<std::u32string> runs;
  for (std::size_t begin = 0; begin < text.size();) {
    std::size_t end = begin;
    while (end < text.size() && is_inside(text[end])) ++end;
    if (end > begin) runs.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return runs;
}

// Words of each sentence as numbers; equal words have equal numbers.
using RougeSentence = std::vector<std::int32_t>;

std::vector<RougeSentence> rouge_sentences_of(std::string_view text,
                                              std::vector<std::u32string>& vocabulary) {
  const std::u32string characters = code_points(text);
  std::vector<RougeSentence> sentences;
  for (const std::u32string& piece :
       character_runs_of(characters, [](char32_t c) { return c != U'.'; })) {
    std::vector<std::u32string> words = words_of(piece);
    if (words.empty()) words.emplace_back();  // a sentence of blanks is one empty word
    if (words.size() > max_sentence_words) words.resize(max_sentence_words);
    RougeSentence sentence;
    for (std::u32string& word : words) {
      vocabulary.push_back(std::move(word));
      sentence.push_back(static_cast<std::int32_t>(vocabulary.size() - 1));
    }
    sentences.push_back(std::move(sentence));
  }
  return sentences;
}

std::size_t different_rouge_words(const std::vector<RougeSentence>& sentences) {
  std::set<std::int32_t> words;
  for (const RougeSentence& sentence : sentences) words.insert(sentence.begin(), sentence.end());
  return words.size();
}

// Adds the words of the longest common subsequence of `expected` and `found` to `common`. Ties:
// walks back from the ends and shortens `found` first, as `rouge` does.
void add_common_words(const RougeSentence& expected, const RougeSentence& found,
                      std::set<std::int32_t>& common) {
  const std::size_t columns = found.size() + 1;
  std::vector<std::uint16_t> lengths((expected.size() + 1) * columns, 0);
  for (std::size_t i = 1; i <= expected.size(); ++i) {
    std::uint16_t* const row = lengths.data() + i * columns;
    const std::uint16_t* const above = row - columns;
    for (std::size_t j = 1; j < columns; ++j) {
      row[j] = expected[i - 1] == found[j - 1] ? static_cast<std::uint16_t>(above[j - 1] + 1)
                                               : std::max(above[j], row[j - 1]);
    }
  }
  for (std::size_t i = expected.size(), j = found.size(); i > 0 && j > 0;) {
    if (expected[i - 1] == found[j - 1]) {
      common.insert(expected[i - 1]);
      --i;
      --j;
    } else if (lengths[(i - 1) * columns + j] > lengths[i * columns + j - 1]) {
      --i;
    } else {
      --j;
    }
  }
}

}  // namespace

std::u32string code_points(std::string_view text) {
  std::string valid;
  text::append_lossy(valid, text, true);
  std::u32string characters;
  characters.reserve(valid.size());
  for (std::string_view rest = valid; !rest.empty();) {
    const auto [codepoint, length] = text::first_character(rest);
    characters.push_back(static_cast<char32_t>(codepoint));
    rest.remove_prefix(length);
  }
  return characters;
}

std::string utf8_of(std::u32string_view text) {
  std::string bytes;
  for (const char32_t c : text) text::append_utf8(bytes, static_cast<utf8proc_int32_t>(c));
  return bytes;
}

bool is_python_space(char32_t c) {
  return (c >= 0x1C && c <= 0x1F) || text::is_white_space(static_cast<utf8proc_int32_t>(c));
}

bool is_python_word(char32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
      return true;
    default:
      return c == U'_' || is_python_letter(c);
  }
}

bool is_python_digit(char32_t c) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(c)) == UTF8PROC_CATEGORY_ND;
}

std::u32string lowered(std::u32string_view text) {
  std::u32string lower;
  lower.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char32_t c = text[i];
    if (c == 0x130) {
      lower += U"i\u0307";
    } else if (c == 0x3A3) {
      lower += ends_cased_word(text, i) ? char32_t{0x3C2} : char32_t{0x3C3};
    } else {
      lower += static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c)));
    }
  }
  return lower;
}

std::vector<std::u32string> words_of(std::u32string_view text) {
  return character_runs_of(text, [](char32_t c) { return !is_python_space(c); });
}

std::u32string_view stripped(std::u32string_view text) {
  while (!text.empty() && is_python_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_python_space(text.back())) text.remove_suffix(1);
  return text;
}

std::vector<std::u32string> digit_runs(std::u32string_view text) {
  return character_runs_of(text, is_python_digit);
}

std::vector<std::u32string> squad_tokens(std::string_view text) {
  std::u32string kept = lowered(code_points(text));
  kept.erase(std::remove_if(kept.begin(), kept.end(), is_ascii_punctuation), kept.end());
  // An article is a run of word characters: characters that are not ASCII punctuation, such as a
  // dash, also bound it.
  for (std::size_t begin = 0; begin < kept.size();) {
    std::size_t end = begin;
    while (end < kept.size() && is_python_word(kept[end])) ++end;
    const std::u32string_view run(kept.data() + begin, end - begin);
    if (run == U"a" || run == U"an" || run == U"the") {
      std::fill(kept.begin() + static_cast<std::ptrdiff_t>(begin),
                kept.begin() + static_cast<std::ptrdiff_t>(end), U' ');
    }
    begin = end + 1;
  }
  return words_of(kept);
}

std::vector<std::u32string> character_tokens(std::string_view text) {
  std::vector<std::u32string> tokens;
  for (const char32_t c : lowered(code_points(text))) {
    if (is_python_space(c) || is_ascii_punctuation(c) || is_chinese_punctuation(c)) continue;
    tokens.emplace_back(1, c);
  }
  return tokens;
}

double bag_f1(std::vector<std::u32string> found, std::vector<std::u32string> expected) {
  std::sort(found.begin(), found.end());
  std::sort(expected.begin(), expected.end());
  std::vector<std::u32string> common;
  std::set_intersection(found.begin(), found.end(), expected.begin(), expected.end(),
                        std::back_inserter(common));
  if (common.empty()) return 0;
  const auto same = static_cast<double>(common.size());
  const double precision = same / static_cast<double>(found.size());
  const double recall = same / static_cast<double>(expected.size());
  return 2 * precision * recall / (precision + recall);
}

double rouge_l(std::string_view found, std::string_view expected) {
  std::vector<std::u32string> vocabulary;
  std::vector<RougeSentence> found_sentences = rouge_sentences_of(found, vocabulary);
  std::vector<RougeSentence> expected_sentences = rouge_sentences_of(expected, vocabulary);
  if (found_sentences.empty() || expected_sentences.empty()) return 0;
  // The index of each word in the sorted list.
  std::vector<std::u32string> ordered = vocabulary;
  std::sort(ordered.begin(), ordered.end());
  for (std::vector<RougeSentence>* sentences : {&found_sentences, &expected_sentences}) {
    for (RougeSentence& sentence : *sentences) {
      for (std::int32_t& word : sentence) {
        word =
            static_cast<std::int32_t>(std::lower_bound(ordered.begin(), ordered.end(),
                                                       vocabulary[static_cast<std::size_t>(word)]) -
                                      ordered.begin());
      }
    }
  }
  std::set<std::int32_t> common;
  for (const RougeSentence& sentence : expected_sentences) {
    for (const RougeSentence& other : found_sentences) add_common_words(sentence, other, common);
  }
  const auto shared = static_cast<double>(common.size());
  const double precision = shared / static_cast<double>(different_rouge_words(found_sentences));
  const double recall = shared / static_cast<double>(different_rouge_words(expected_sentences));
  return 2 * (precision * recall / (precision + recall + 1e-8));
}

double edit_similarity(std::string_view a, std::string_view b) {
  const std::u32string first = code_points(a), second = code_points(b);
  if (first == second) return 1;
  if (first.empty() || second.empty()) return 0;
  // Lengths of longest common subsequences, row by row.
  std::vector<std::int64_t> row(second.size() + 1, 0);
  for (const char32_t c : first) {
    std::int64_t diagonal = 0;
    for (std::size_t j = 1; j < row.size(); ++j) {
      const std::int64_t above = row[j];
      row[j] = c == second[j - 1] ? diagonal + 1 : std::max(above, row[j - 1]);
      diagonal = above;
    }
  }
  // Keep this order of operations: rounding decides values halfway between two percents.
  const auto total = static_cast<double>(first.size() + second.size());
  const double ratio = 1 - (total - 2 * static_cast<double>(row.back())) / total;
  return std::nearbyint(100 * ratio) / 100;
}

}  // namespace kvzap::eval
