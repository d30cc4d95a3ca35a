// Texts as the published scorers, which are Python programs, see them: code points, lowered, split
// and normalized by the rules of Python's str. Also has the counts that several scorers share.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kvzap::eval {

/// Code points; U+FFFD in place of invalid UTF-8.
std::u32string code_points(std::string_view text);
/// UTF-8 of code points.
std::string utf8_of(std::u32string_view text);

/// str.isspace: Unicode's white space and U+001C to U+001F.
bool is_python_space(char32_t c);
/// \w of re: letters and numbers of any kind, and the underscore.
bool is_python_word(char32_t c);
/// \d of re: decimal digits of any script.
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
/// punctuation and the articles a, an, the; split at white space.
std::vector<std::u32string> squad_tokens(std::string_view text);
/// The characters in lower case, without white space and without ASCII and Chinese punctuation
/// (InfiniteBench); each is a token.
std::vector<std::u32string> character_tokens(std::string_view text);

/// 2 P R / (P + R) of two bags of tokens; 0 if they share none.
double bag_f1(std::vector<std::u32string> found, std::vector<std::u32string> expected);

/// ROUGE-L over sentences (Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004,
/// section 3.2, with beta = 1), as the Python package `rouge` 1.0.1 counts it. Sentences end at
/// full stops, words at white space, case matters, and each word counts once. U is the set of words
/// in the longest common subsequence of any sentence of one text and any of the other. P = |U| /
/// distinct words found and R = |U| / distinct words expected. 0 if either text has no sentence.
double rouge_l(std::string_view found, std::string_view expected);

/// 1 - (insertions and deletions between the texts) / (sum of both lengths), in code points,
/// rounded to whole percents, half to even: fuzz.ratio / 100 of fuzzywuzzy with python-Levenshtein.
/// 1 for two empty texts.
double edit_similarity(std::string_view a, std::string_view b);

}  // namespace kvzap::eval
