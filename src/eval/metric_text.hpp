// Texts as the published scorers, which are written in Python, see them: as code points, lowered,
// cut and normalised by the rules of Python's str. And what several of them count.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kvzap::detail {

/// Code points; U+FFFD stands for what is not UTF-8.
std::u32string code_points(std::string_view text);
/// The reverse.
std::string utf8_of(std::u32string_view text);

/// str.isspace: Unicode's white space and U+001C to U+001F.
bool is_python_space(char32_t c);
/// What \w matches in re: letters and numbers of any kind, and the underscore.
bool is_python_word(char32_t c);
/// What \d matches in re: decimal digits of any script.
bool is_python_digit(char32_t c);

/// str.lower, with capital sigma and dotted capital I.
std::u32string lowered(std::u32string_view text);
/// str.split without arguments.
std::vector<std::u32string> words_of(std::u32string_view text);
/// str.strip without arguments.
std::u32string_view stripped(std::u32string_view text);
/// re.findall(r"\d+").
std::vector<std::u32string> digit_runs(std::u32string_view text);

/// SQuAD's normalisation (Rajpurkar et al., arXiv 1606.05250): lower case, without ASCII
/// punctuation and the articles a, an, the; cut at white space.
std::vector<std::u32string> squad_tokens(std::string_view text);
/// The characters that are left in lower case without white space, ASCII and Chinese punctuation
/// (InfiniteBench), each a token.
std::vector<std::u32string> character_tokens(std::string_view text);

/// 2 P R / (P + R) of two bags of tokens; 0 if they share none.
double bag_f1(std::vector<std::u32string> found, std::vector<std::u32string> expected);

/// ROUGE-L over sentences (Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004,
/// section 3.2, with beta = 1), as the Python package `rouge` 1.0.1 counts it: sentences end at
/// full stops, words are what white space separates, upper and lower case differ, and each word
/// counts once: with U the set of words that lie in the longest common subsequence of any sentence
/// of one text and any of the other, P = |U| / different words found, R = |U| / different words
/// expected. 0 if either text has no sentence.
double rouge_l(std::string_view found, std::string_view expected);

/// 1 - (insertions and deletions that make one of the other) / (sum of both lengths), in code
/// points and rounded to whole percents, half to even: fuzz.ratio / 100 of fuzzywuzzy over
/// python-Levenshtein. 1 for two empty texts.
double edit_similarity(std::string_view a, std::string_view b);

}  // namespace kvzap::detail
