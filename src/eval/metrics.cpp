#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <kvzap/core/types.hpp>
#include <kvzap/lab/metrics.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "eval/metric_tasks.hpp"
#include "eval/metric_text.hpp"
#include "files/nearest.hpp"

namespace kvzap {
namespace {

using eval::code_points;
using eval::stripped;

[[noreturn]] void reject_answer(std::string_view metric, std::string_view expected,
                                std::string_view found) {
  constexpr std::size_t most = 60;
  throw Error(fmt::format("answer: expected {} for metric {}, found \"{}\"", expected, metric,
                          found.size() <= most
                              ? std::string(found)
                              : eval::utf8_of(code_points(found.substr(0, most))) + "..."));
}

// Returns the best score over the expected answers.
template <class Score>
double best_of_answers(const Task& task, Score&& score) {
  double best = 0;
  for (const std::string& expected : task.answers) best = std::max(best, score(expected));
  return best;
}

bool is_one_of_answers(const Task& task, std::u32string_view found) {
  return std::any_of(task.answers.begin(), task.answers.end(),
                     [&](const std::string& expected) { return found == code_points(expected); });
}

// Returns the part of an answer that LongBench scores.
std::string_view judged_part(const Task& task, std::string_view answer) {
  if (!eval::judges_first_line(task.task)) return answer;
  answer.remove_prefix(std::min(answer.find_first_not_of('\n'), answer.size()));
  return answer.substr(0, answer.find('\n'));
}

double share_of_answers_held(const Task& task, std::string_view answer) {
  const std::u32string lower = eval::lowered(code_points(answer));
  const auto held =
      std::count_if(task.answers.begin(), task.answers.end(), [&](const std::string& expected) {
        return lower.find(eval::lowered(code_points(expected))) != std::u32string::npos;
      });
  return static_cast<double>(held) / static_cast<double>(task.answers.size());
}

double is_one_answer_held(const Task& task, std::string_view answer) {
  return share_of_answers_held(task, answer) > 0 ? 1 : 0;
}

// Rejects an empty expected answer, because an empty text is part of every text.
void check_no_empty_answer(const Task& task) {
  for (const std::string& expected : task.answers) {
    if (expected.empty()) reject_answer("string_match", "a text that is not empty", expected);
  }
}

double score_exact(const Task& task, std::string_view answer) {
  const std::u32string found = code_points(answer);
  return best_of_answers(task, [&](const std::string& expected) {
    return stripped(found) == stripped(code_points(expected)) ? 1.0 : 0.0;
  });
}

double score_token_f1(const Task& task, std::string_view answer) {
  const auto found = eval::squad_tokens(judged_part(task, answer));
  return best_of_answers(task, [&](const std::string& expected) {
    return eval::bag_f1(found, eval::squad_tokens(expected));
  });
}

double score_char_f1(const Task& task, std::string_view answer) {
  const auto found = eval::character_tokens(judged_part(task, answer));
  return best_of_answers(task, [&](const std::string& expected) {
    return eval::bag_f1(found, eval::character_tokens(expected));
  });
}

double score_rouge_l(const Task& task, std::string_view answer) {
  return best_of_answers(task, [&](const std::string& expected) {
    return eval::rouge_l(judged_part(task, answer), expected);
  });
}

// A class counts as named if its name is in the answer, unless it is part of the expected name. The
// published scorer removes such names from the list over which it iterates, and so skips the name
// after each of them. This function does the same, for comparable results.
double score_classification(const Task& task, std::string_view answer) {
  const std::string_view judged = judged_part(task, answer);
  std::vector<std::string_view> all_named;
  for (const std::string& name : task.classes) {
    if (judged.find(name) != std::string_view::npos) all_named.emplace_back(name);
  }
  return best_of_answers(task, [&](const std::string& expected) {
    std::vector<std::string_view> named = all_named;
    for (std::size_t i = 0; i < named.size(); ++i) {
      const std::string_view name = named[i];
      if (name == expected || expected.find(name) == std::string::npos) continue;
      named.erase(std::find(named.begin(), named.end(), name));
    }
    const bool is_named = std::find(named.begin(), named.end(), expected) != named.end();
    return is_named ? 1 / static_cast<double>(named.size()) : 0.0;
  });
}

void check_classification(const Task& task) {
  for (const std::string& expected : task.answers) {
    if (std::find(task.classes.begin(), task.classes.end(), expected) != task.classes.end()) return;
  }
  reject_answer("classification", "one of all_classes", task.answers.front());
}

// Scores the first line without the mark of a comment or of a code fence.
double score_code_similarity(const Task& task, std::string_view answer) {
  answer.remove_prefix(std::min(answer.find_first_not_of('\n'), answer.size()));
  std::string_view judged;
  for (std::string_view rest = answer; !rest.empty();) {
    const std::size_t end = rest.find('\n');
    const std::string_view line = rest.substr(0, end);
    if (line.find_first_of("`#") == std::string_view::npos &&
        line.find("//") == std::string_view::npos) {
      judged = line;
      break;
    }
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
  }
  return best_of_answers(
      task, [&](const std::string& expected) { return eval::edit_similarity(judged, expected); });
}

// Returns the fraction of the answer's numbers that equal `expected`.
double share_of_numbers(std::string_view answer, std::u32string_view expected) {
  const auto numbers = eval::digit_runs(code_points(answer));
  if (numbers.empty()) return 0;
  const auto right = std::count(numbers.begin(), numbers.end(), expected);
  return static_cast<double>(right) / static_cast<double>(numbers.size());
}

double score_count(const Task& task, std::string_view answer) {
  return best_of_answers(task, [&](const std::string& expected) {
    return share_of_numbers(answer, code_points(expected));
  });
}

void check_digits(const Task& task, std::string_view metric) {
  for (const std::string& expected : task.answers) {
    if (expected.empty() || expected.find_first_not_of("0123456789") != std::string::npos) {
      reject_answer(metric, "digits alone", expected);
    }
  }
}

// Returns the digits after the first `word` that digits follow; empty if there is none.
std::u32string number_behind(std::u32string_view text, std::u32string_view word) {
  for (std::size_t at = text.find(word); at != std::u32string_view::npos;
       at = text.find(word, at + 1)) {
    std::u32string_view rest = text.substr(at + word.size());
    if (rest.empty() || !eval::is_python_digit(rest.front())) continue;
    return eval::digit_runs(rest).front();
  }
  return {};
}

constexpr std::u32string_view english_paragraph = U"Paragraph ";
constexpr std::u32string_view chinese_paragraph = U"\u6bb5\u843d";

double score_retrieval(const Task& task, std::string_view answer, std::u32string_view word) {
  return best_of_answers(task, [&](const std::string& expected) {
    return share_of_numbers(answer, number_behind(code_points(expected), word));
  });
}

void check_retrieval(const Task& task, std::string_view metric, std::u32string_view word) {
  for (const std::string& expected : task.answers) {
    if (!number_behind(code_points(expected), word).empty()) continue;
    reject_answer(metric, fmt::format("\"{}\" and a number", eval::utf8_of(word)), expected);
  }
}

double score_first_integer(const Task& task, std::string_view answer) {
  const std::size_t begin = answer.find_first_of("0123456789");
  if (begin == std::string_view::npos) return 0;
  const std::size_t end = answer.find_first_not_of("0123456789", begin);
  const std::string_view first = answer.substr(begin, end - begin);
  return best_of_answers(
      task, [&](const std::string& expected) { return first == expected ? 1.0 : 0.0; });
}

double score_contains_word(const Task& task, std::string_view answer) {
  std::u32string text = code_points(answer);
  constexpr std::u32string_view between_words = U":\"'.,?!{}";
  for (char32_t& c : text) {
    if (between_words.find(c) != std::u32string_view::npos) c = U' ';
  }
  const std::vector<std::u32string> words = eval::words_of(text);
  return best_of_answers(task, [&](const std::string& expected) {
    return std::find(words.begin(), words.end(), code_points(expected)) != words.end() ? 1.0 : 0.0;
  });
}

void check_one_word(const Task& task) {
  for (const std::string& expected : task.answers) {
    const std::u32string text = code_points(expected);
    if (eval::words_of(text) != std::vector<std::u32string>{text}) {
      reject_answer("contains_word", "one word", expected);
    }
  }
}

bool is_choice(char32_t c) { return c >= U'A' && c <= U'D'; }

// Returns the last separate letter from A to D in the first line with one, or 0 if there is none.
char32_t lone_choice(std::u32string_view text) {
  char32_t last = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == U'\n' && last != 0) break;
    const bool stands_alone = (i == 0 || !eval::is_python_word(text[i - 1])) &&
                              (i + 1 == text.size() || !eval::is_python_word(text[i + 1]));
    if (is_choice(text[i]) && stands_alone) last = text[i];
  }
  return last;
}

// Applies InfiniteBench's rules for longbook_choice_eng, one after another, until one decides.
bool is_choice_right(const Task& task, std::u32string_view answer) {
  const auto is_right = [&](std::u32string_view found) { return is_one_of_answers(task, found); };
  std::u32string text(stripped(answer));
  const char32_t lone = lone_choice(text);
  if (lone != 0 && is_right({&lone, 1})) return true;
  if (text.empty()) return false;
  if (is_choice(text.front())) return is_right({text.data(), 1});
  if (is_right(text)) return true;
  constexpr std::u32string_view between_words = U"\n\"'.,?!{} ";
  std::u32string spaced;
  for (const char32_t c : text) {
    const bool is_blank = between_words.find(c) != std::u32string_view::npos;
    if (!is_blank || spaced.empty() || spaced.back() != U' ') spaced += is_blank ? U' ' : c;
  }
  for (const std::u32string_view before : {U"answer is:", U"answer:", U"answer is", U"option is"}) {
    const std::size_t at = spaced.find(before);
    if (at == std::u32string::npos) continue;
    if (spaced.size() < at + before.size() + 1) return false;
    const std::u32string_view rest = std::u32string_view(spaced).substr(at + before.size() + 1);
    return std::any_of(task.answers.begin(), task.answers.end(), [&](const std::string& expected) {
      const std::u32string choice = code_points(expected);
      return rest.substr(0, choice.size()) == choice;
    });
  }
  for (const std::u32string& word : eval::words_of(spaced)) {
    if (std::u32string_view(U"ABCD").find(word) != std::u32string_view::npos) return is_right(word);
  }
  return false;
}

double score_multiple_choice(const Task& task, std::string_view answer) {
  return is_choice_right(task, code_points(answer)) ? 1 : 0;
}

void check_choices(const Task& task, std::string_view metric) {
  for (const std::string& expected : task.answers) {
    if (expected.size() == 1 && expected[0] >= 'A' && expected[0] <= 'D') return;
  }
  reject_answer(metric, "a letter from A to D", task.answers.front());
}

double score_stated_choice(const Task& task, std::string_view answer) {
  std::string text(answer);
  text.erase(std::remove(text.begin(), text.end(), '*'), text.end());
  // A choice in parentheses takes precedence.
  for (const bool in_parentheses : {true, false}) {
    const std::string_view before =
        in_parentheses ? "The correct answer is (" : "The correct answer is ";
    for (std::size_t at = text.find(before); at != std::string::npos;
         at = text.find(before, at + 1)) {
      const std::string_view rest = std::string_view(text).substr(at + before.size());
      if (rest.empty() || rest[0] < 'A' || rest[0] > 'D') continue;
      if (in_parentheses && rest.substr(1, 1) != ")") continue;
      return is_one_of_answers(task, code_points(rest.substr(0, 1))) ? 1 : 0;
    }
  }
  return 0;
}

// Returns in `content` the text of the last \boxed{...}, without white space and $. If the brace is
// not closed, the text extends to the answer's end. Returns false if there is no \boxed.
bool last_boxed(std::string_view answer, std::u32string& content) {
  constexpr std::string_view begin = "boxed{";
  const std::size_t at = answer.rfind(begin);
  if (at == std::string_view::npos) return false;
  content.clear();
  int depth = 0;
  for (const char32_t c : code_points(answer.substr(at + begin.size()))) {
    if (c == U'{') ++depth;
    if (c == U'}' && --depth < 0) break;
    if (!eval::is_python_space(c) && c != U'$') content += c;
  }
  return true;
}

std::u32string without_blanks(std::u32string_view text) {
  std::u32string rest;
  for (const char32_t c : text) {
    if (!eval::is_python_space(c) && c != U'$') rest += c;
  }
  return rest;
}

double score_boxed_text(const Task& task, std::string_view answer) {
  std::u32string found;
  if (!last_boxed(answer, found)) return 0;
  return best_of_answers(task, [&](const std::string& expected) {
    return found == without_blanks(code_points(expected)) ? 1.0 : 0.0;
  });
}

// Removes +, leading zeros and surrounding white space. Returns an empty text unless `text` is an
// integer.
std::u32string integer_of(std::u32string_view text) {
  text = stripped(text);
  const bool is_negative = !text.empty() && text.front() == U'-';
  if (is_negative || (!text.empty() && text.front() == U'+')) text.remove_prefix(1);
  const bool has_digits = !text.empty() && std::all_of(text.begin(), text.end(), [](char32_t c) {
    return c >= U'0' && c <= U'9';
  });
  if (!has_digits) return {};
  while (text.size() > 1 && text.front() == U'0') text.remove_prefix(1);
  return (is_negative && text != U"0" ? U"-" : U"") + std::u32string(text);
}

double score_boxed_integer(const Task& task, std::string_view answer) {
  std::u32string found;
  if (!last_boxed(answer, found)) return 0;
  found = integer_of(found);
  return best_of_answers(task, [&](const std::string& expected) {
    return !found.empty() && found == integer_of(code_points(expected)) ? 1.0 : 0.0;
  });
}

void check_integers(const Task& task) {
  for (const std::string& expected : task.answers) {
    if (integer_of(code_points(expected)).empty()) {
      reject_answer("boxed_integer", "an integer", expected);
    }
  }
}

void check_continuation(const Task& task) {
  if (task.answers.size() != 1) {
    throw Error(
        fmt::format("answer: expected one text for metric perplexity, the continuation, found {}",
                    task.answers.size()));
  }
  if (task.answers.front().empty()) reject_answer("perplexity", "a continuation", "");
}

// Resolves other names of metrics.
std::string metric_name_of(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 9> names = {
      {{"string_match_any", "string_match_part"},
       {"qa_f1_score", "token_f1"},
       {"rouge_score", "rouge_l"},
       {"classification_score", "classification"},
       {"code_sim_score", "code_similarity"},
       {"count_score", "count"},
       {"retrieval_score", "retrieval"},
       {"retrieval_zh_score", "retrieval_zh"},
       {"qa_f1_score_zh", "char_f1"}}};
  for (const auto& [published, known] : names) {
    if (name == published) return std::string(known);
  }
  return std::string(name);
}

std::vector<std::string> metric_names() {
  std::vector<std::string> names;
  for (const MetricInfo& info : metrics()) names.push_back(info.name);
  return names;
}

}  // namespace

const std::vector<MetricInfo>& metrics() {
  static const std::vector<MetricInfo> infos = {
      {"string_match_all",
       "share of the expected answers that the answer contains, upper and lower case alike (RULER)",
       false, false, 128, share_of_answers_held, check_no_empty_answer},
      {"string_match_part",
       "one of the expected answers is in the answer, upper and lower case alike (RULER)", false,
       false, 32, is_one_answer_held, check_no_empty_answer},
      {"exact", "the answer is an expected one, but for white space around it", false, false, 32,
       score_exact, nullptr},
      {"token_f1",
       "F1 of words without case, punctuation and articles (SQuAD; LongBench's qa_f1_score)", false,
       false, 128, score_token_f1, nullptr},
      {"char_f1", "F1 of characters without case, punctuation and white space (InfiniteBench)",
       false, false, 64, score_char_f1, nullptr},
      {"rouge_l", "ROUGE-L, F with beta 1, as the Python package rouge counts it (LongBench)",
       false, false, 512, score_rouge_l, nullptr},
      {"classification", "the answer names the expected class, and no other (LongBench)", true,
       false, 64, score_classification, check_classification},
      {"code_similarity",
       "edit similarity of the first line that is no comment with the expected one (LongBench)",
       false, false, 64, score_code_similarity, nullptr},
      {"count", "share of the answer's numbers that are the expected one (LongBench)", false, false,
       32, score_count, [](const Task& task) { check_digits(task, "count"); }},
      {"retrieval",
       "share of the answer's numbers that are the expected \"Paragraph N\"'s (LongBench)", false,
       false, 32,
       [](const Task& task, std::string_view answer) {
         return score_retrieval(task, answer, english_paragraph);
       },
       [](const Task& task) { check_retrieval(task, "retrieval", english_paragraph); }},
      {"retrieval_zh",
       "share of the answer's numbers that are the expected \"\u6bb5\u843dN\"'s (LongBench)", false,
       false, 32,
       [](const Task& task, std::string_view answer) {
         return score_retrieval(task, answer, chinese_paragraph);
       },
       [](const Task& task) { check_retrieval(task, "retrieval_zh", chinese_paragraph); }},
      {"first_integer", "the answer's first digits are the expected ones (InfiniteBench's passkey)",
       false, false, 32, score_first_integer,
       [](const Task& task) { check_digits(task, "first_integer"); }},
      {"contains_word",
       "the expected word is among the answer's words (InfiniteBench's kv_retrieval)", false, false,
       64, score_contains_word, check_one_word},
      {"multiple_choice", "the answer chooses the expected letter, A to D (InfiniteBench)", false,
       false, 40, score_multiple_choice,
       [](const Task& task) { check_choices(task, "multiple_choice"); }},
      {"stated_choice",
       "the answer says \"The correct answer is (C)\" with the expected letter (LongBench-v2)",
       false, false, 128, score_stated_choice,
       [](const Task& task) { check_choices(task, "stated_choice"); }},
      {"boxed_integer", "the last \\boxed{...} holds the expected integer (AIME)", false, false,
       32000, score_boxed_integer, check_integers},
      {"boxed_text",
       "the last \\boxed{...} holds the expected text, but for white space (MATH-500)", false,
       false, 32000, score_boxed_text, nullptr},
      {"perplexity", "exp of the mean negative log-likelihood of the expected text's tokens", false,
       true, 1, nullptr, check_continuation},
  };
  return infos;
}

const MetricInfo& metric_of(const Task& task) {
  std::string name = metric_name_of(task.metric);
  if (name.empty()) {
    const eval::TaskDefaults defaults = eval::task_defaults(task.task);
    if (defaults.metric.empty()) {
      throw Error(fmt::format("metric: expected one for task {}: {}", task.task, defaults.missing));
    }
    name = defaults.metric;
  }
  const std::vector<MetricInfo>& infos = metrics();
  const auto info = std::find_if(infos.begin(), infos.end(),
                                 [&](const MetricInfo& known) { return known.name == name; });
  if (info == infos.end()) {
    const std::string nearest = files::nearest_name(name, metric_names());
    std::string names;
    for (const std::string& known : metric_names()) names += (names.empty() ? "" : ", ") + known;
    throw Error(fmt::format("metric: expected one of {}, found {}{}", names, name,
                            nearest.empty() ? "" : fmt::format("; did you mean {}?", nearest)));
  }
  if (task.answers.empty()) throw Error("answer: expected at least one, found none");
  if (info->needs_classes && task.classes.empty()) {
    throw Error(fmt::format("all_classes: expected the classes for metric {}, found none", name));
  }
  if (info->check) info->check(task);
  return *info;
}

std::int64_t default_max_new_tokens(const Task& task) {
  const std::int64_t metric_default = metric_of(task).max_new_tokens;
  const std::int64_t task_default = eval::task_defaults(task.task).max_new_tokens;
  return task_default > 0 ? task_default : metric_default;
}

}  // namespace kvzap
