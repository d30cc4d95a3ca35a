// Scores against the published scorers' figures, and the statistics over them.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <kvzap/lab/metrics.hpp>
#include <kvzap/lab/tasks.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "unit/temporary_folder.hpp"

namespace kvzap {
namespace {

using Texts = std::vector<std::string>;

Task task_with(const std::string& metric, const Texts& answers, const std::string& name = "x",
               const Texts& classes = {}) {
  Task task;
  task.task = name;
  task.metric = metric;
  task.answers = answers;
  task.classes = classes;
  return task;
}

struct ScoreCase {
  const char* metric;
  Texts answers;
  const char* answer;
  double score;
};

void expect_scores(const std::vector<ScoreCase>& cases) {
  for (const ScoreCase& c : cases) {
    const Task task = task_with(c.metric, c.answers);
    EXPECT_NEAR(metric_of(task).score(task, c.answer), c.score, 1e-12)
        << c.metric << " of \"" << c.answer << "\" for \"" << c.answers.front() << '"';
  }
}

// RULER's string_match_all and string_match_part.
TEST(Metrics, FindsExpectedTexts) {
  expect_scores({{"string_match_all", {"4467", "Rouen"}, "It is rouen, near 14467.", 1},
                 {"string_match_all", {"4467", "Rouen", "x"}, "Rouen", 0.3333333333333333},
                 {"string_match_all", {"STRASSE"}, "stra\u00dfe", 0},
                 {"string_match_all",
                  {"\u00c9COLE", "\u0130zmir"},
                  "l\u2019\u00e9cole d\u2019i\u0307zmir",
                  1},
                 {"string_match_all",
                  {"\u1f48\u0394\u03a5\u03a3\u03a3\u0395\u038e\u03a3"},
                  "\u1f40\u03b4\u03c5\u03c3\u03c3\u03b5\u03cd\u03c2",
                  1},
                 {"string_match_all", {"a"}, "", 0},
                 {"string_match_part", {"4467", "Rouen"}, "ROUEN", 1},
                 {"string_match_part", {"4467", "Rouen"}, "none of them", 0},
                 {"exact", {"Rouen"}, " Rouen\n", 1},
                 {"exact", {"Rouen"}, "rouen", 0},
                 {"exact", {"Rouen", " Caen "}, "Caen", 1}});
}

// LongBench's qa_f1_score, and InfiniteBench's by character.
TEST(Metrics, CountSharedTokens) {
  expect_scores({{"token_f1", {"The river Aare", "Aare"}, "It is the Aare!", 0.5},
                 {"token_f1", {"an apple a day"}, "a day, an apple", 1},
                 {"token_f1", {"cat cat dog"}, "cat dog dog bird", 0.5714285714285715},
                 {"token_f1", {"U.S.A."}, "usa", 1},
                 {"token_f1", {"the"}, "the", 0},
                 {"token_f1", {"x"}, "", 0},
                 {"token_f1", {"well\u2013the one"}, "well\u2013 one", 1},
                 {"token_f1",
                  {"\u1f48\u0394\u03a5\u03a3\u03a3\u0395\u038e\u03a3 \u00a9"},
                  "\u1f40\u03b4\u03c5\u03c3\u03c3\u03b5\u03cd\u03c2 \u201cquoted\u201d",
                  0.5},
                 {"token_f1", {"a\u00a0b\u2003c"}, "b c", 1},
                 {"char_f1",
                  {"\u5317\u4eac\uff0c\u4e2d\u56fd\u3002"},
                  "\u4e2d\u56fd\u7684\u5317\u4eac",
                  0.888888888888889},
                 {"char_f1", {"Ab c!"}, "\u201ca B\u201d", 0.8},
                 {"char_f1", {"\uff0c\u3002"}, "\uff0c\u3002", 0}});
}

// The package rouge 1.0.1, and fuzz.ratio over python-Levenshtein.
TEST(Metrics, MeasureSubsequences) {
  expect_scores(
      {{"rouge_l", {"the cat sat on the mat"}, "the cat sat on the mat", 0.999999995},
       {"rouge_l",
        {"The cat sat on the mat. It slept."},
        "the cat lay on the mat. Then it slept. The end",
        0.6666666617283951},
       {"rouge_l",
        {"one two three four five", "five four"},
        "five one four two six three",
        0.5454545404958678},
       {"rouge_l", {"a b a b a b c"}, "b a c b a", 0.6666666616666668},
       {"rouge_l", {"one.  . two"}, "two. .one three", 0.8571428522448981},
       {"rouge_l", {"..."}, "one", 0},
       {"rouge_l", {"one"}, "", 0},
       {"rouge_l", {"\u00fcber\u00a0den Flu\u00df"}, "\u00fcber\nden  Fluss", 0.6666666616666668},
       {"code_similarity",
        {"    return total / count"},
        "\n\n# the mean\n```python\n    return sum / count\nmore",
        0.83},
       {"code_similarity", {"x = 1"}, "x = 1", 1},
       {"code_similarity", {"x = 1"}, "// only a comment", 0},
       {"code_similarity", {"abcdefgh"}, "abcde---", 0.62},
       {"code_similarity", {"\u00e9"}, "e", 0},
       {"code_similarity",
        {"xxxxxxxxxxxxxxxxxyyyyyyyyyyyyyyyyyyyyyyy"},
        "xxxxxxxxxxxxxxxxxzzzzzzzzzzzzzzzzzzzzzzz",
        0.43},
       {"code_similarity", {"ab", "ba"}, "aab", 0.8}});
}

// LongBench's count and retrieval scores, InfiniteBench's passkey and kv_retrieval.
TEST(Metrics, ReadNumbers) {
  expect_scores(
      {{"count", {"12"}, "12 or 12, not 13", 0.6666666666666666},
       {"count", {"12"}, "012", 0},
       {"count", {"12"}, "no number", 0},
       {"retrieval", {"Paragraph 7"}, "Paragraph 7", 1},
       {"retrieval", {"Paragraph x, Paragraph 7"}, "7 and 17 and 7.5", 0.5},
       {"retrieval_zh", {"\u6bb5\u843d7"}, "\u6bb5\u843d7\uff0c\u4e0d\u662f\u6bb5\u843d8", 0.5},
       {"retrieval_zh", {"\u6bb5\u843d7"}, "\u6bb5\u843d\u0667", 0},
       {"first_integer", {"71432"}, "The key is 71432, or 5", 1},
       {"first_integer", {"71432"}, "5, 71432", 0},
       {"first_integer", {"71432"}, "", 0},
       {"contains_word", {"e6aa-4656"}, "It is \"e6aa-4656\".", 1},
       {"contains_word", {"e6aa-4656"}, "xe6aa-4656", 0}});
}

// InfiniteBench's longbook_choice_eng, and LongBench-v2's sentence.
TEST(Metrics, ReadChoices) {
  expect_scores(
      {{"multiple_choice", {"B"}, "B", 1},
       {"multiple_choice", {"B"}, "Not A but B.\nC", 1},
       {"multiple_choice", {"B"}, "A. Then B", 1},
       {"multiple_choice", {"B"}, "Because of that", 1},
       {"multiple_choice", {"B"}, "the answer is: B2", 1},
       {"multiple_choice", {"B"}, "the answer is:", 0},
       {"multiple_choice", {"B"}, "option_B is it, (B)?", 1},
       {"multiple_choice", {"B"}, "surely BC", 0},
       {"multiple_choice", {"B"}, " \n", 0},
       {"multiple_choice", {"B"}, "\u00e9B is one word", 0},
       {"stated_choice", {"C"}, "So **The correct answer is (C)**.", 1},
       {"stated_choice", {"C"}, "The correct answer is C", 1},
       {"stated_choice", {"C"}, "The correct answer is B, no: The correct answer is (C)", 1},
       {"stated_choice", {"C"}, "The correct answer is (C", 0},
       {"stated_choice", {"C"}, "C", 0},
       {"stated_choice", {"C"}, "The correct answer is ", 0}});
}

// kvpress takes the text up to the first }; here braces may nest and integers compare as such.
TEST(Metrics, ReadBoxes) {
  expect_scores({{"boxed_integer", {"25"}, "so \\boxed{25}.", 1},
                 {"boxed_integer", {"25"}, "first \\boxed{1}, then \\boxed{ $025$ }", 1},
                 {"boxed_integer", {"25"}, "\\boxed{1} is not 25", 0},
                 {"boxed_integer", {"25"}, "25", 0},
                 {"boxed_integer", {"25"}, "\\boxed{25", 1},
                 {"boxed_integer", {"025"}, "$\\boxed{25}$", 1},
                 {"boxed_integer", {"25"}, "\\boxed{25.0}", 0},
                 {"boxed_integer", {"-0"}, "\\boxed{+0}", 1},
                 {"boxed_integer", {"25"}, "\\boxed{}", 0},
                 {"boxed_text", {"\\frac{1}{2}"}, "\\boxed{ \\frac{1}{2} } and more", 1},
                 {"boxed_text", {"\\frac{1}{2}"}, "\\boxed{\\frac12}", 0}});
}

TEST(Metrics, CountsLongBenchsClasses) {
  const Texts classes = {"Date", "Other number", "Other", "number", "Number of things"};
  const auto score = [&](const std::string& expected, const std::string& answer,
                         const std::string& name = "trec") {
    const Task task = task_with("", {expected}, name, classes);
    return metric_of(task).score(task, answer);
  };
  EXPECT_EQ(score("Date", "Date"), 1);
  EXPECT_EQ(score("Date", "date"), 0);
  EXPECT_EQ(score("Date", ""), 0);
  EXPECT_EQ(score("Date", "Date or Other"), 0.5);
  // Names within the expected one do not count, but for one after another that is taken away.
  EXPECT_EQ(score("Other number", "Other number"), 0.5);
  // The first line alone, if it is one of the tasks that LongBench treats so.
  EXPECT_EQ(score("Date", "\n\nDate\nOther"), 1);
  EXPECT_EQ(score("Date", "\n\nDate\nOther", "trec_e"), 1);
  EXPECT_EQ(score("Date", "\n\nDate\nOther", "TREC"), 1);
  const Task other = task_with("classification", {"Date"}, "x", classes);
  EXPECT_EQ(metric_of(other).score(other, "\n\nDate\nOther"), 0.5);
  const Task trivia = task_with("", {"Aare"}, "triviaqa");
  EXPECT_EQ(metric_of(trivia).score(trivia, "\nthe Aare.\nQuestion: what"), 1);
}

TEST(Metrics, AreFoundByTheTasksName) {
  const std::vector<std::array<const char*, 3>> tasks = {
      {"niah_multikey_3", "a", "string_match_all"},
      {"vt", "a", "string_match_all"},
      {"cwe_4096", "a", "string_match_all"},
      {"qa_1", "a", "string_match_part"},
      {"facts", "a", "string_match_all"},
      {"qasper", "a", "token_f1"},
      {"qasper_e", "a", "token_f1"},
      {"2wikimqa-e", "a", "token_f1"},
      {"gov_report", "a", "rouge_l"},
      {"repobench-p", "a", "code_similarity"},
      {"passage_count", "3", "count"},
      {"passage_retrieval_en", "Paragraph 3", "retrieval"},
      {"passage_retrieval_zh", "\u6bb5\u843d3", "retrieval_zh"},
      {"passkey", "12345", "first_integer"},
      {"kv_retrieval", "a-b", "contains_word"},
      {"longbook_choice_eng", "A", "multiple_choice"},
      {"LongBench-v2", "A", "stated_choice"},
      {"AIME_2024", "12", "boxed_integer"},
      {"math500", "12", "boxed_text"}};
  for (const auto& [name, answer, metric] : tasks) {
    EXPECT_EQ(metric_of(task_with("", {answer}, name)).name, metric) << name;
  }
  EXPECT_EQ(metric_of(task_with("qa_f1_score", {"a"}, "vt")).name, "token_f1");
  EXPECT_EQ(default_max_new_tokens(task_with("", {"a"}, "fwe")), 50);
  EXPECT_EQ(default_max_new_tokens(task_with("", {"a"}, "samsum_e")), 128);
  EXPECT_EQ(default_max_new_tokens(task_with("exact", {"a"}, "x")), 32);
}

TEST(Metrics, RefuseWhatTheyCannotJudge) {
  const auto refuse = [](const Task& task, std::initializer_list<std::string_view> parts) {
    test::expect_error([&] { (void)metric_of(task); }, parts);
  };
  refuse(task_with("tokenf1", {"a"}), {"metric: ", "found tokenf1; did you mean token_f1?"});
  refuse(task_with("", {"a"}, "vcsum"), {"vcsum", "Chinese"});
  refuse(task_with("", {"a"}, "code_run"), {"code_run"});
  refuse(task_with("exact", {}), {"answer: expected at least one"});
  refuse(task_with("string_match_all", {"a", ""}), {"answer: ", "not empty"});
  refuse(task_with("classification", {"a"}), {"all_classes: "});
  refuse(task_with("classification", {"a"}, "x", {"b"}),
         {"answer: ", "all_classes", "found \"a\""});
  refuse(task_with("count", {"three"}), {"answer: expected digits", "count", "three"});
  refuse(task_with("retrieval", {"3"}), {"answer: ", "\"Paragraph \" and a number", "retrieval"});
  refuse(task_with("multiple_choice", {"E"}), {"A to D", "found \"E\""});
  refuse(task_with("boxed_integer", {"1/2"}), {"an integer", "1/2"});
  refuse(task_with("perplexity", {"a", "b"}), {"perplexity", "found 2"});
  const MetricInfo& perplexity = metric_of(task_with("perplexity", {"a"}));
  EXPECT_TRUE(perplexity.is_perplexity);
  EXPECT_FALSE(perplexity.score);
  for (const MetricInfo& info : metrics()) {
    EXPECT_EQ(info.is_perplexity, !info.score) << info.name;
    EXPECT_GT(info.max_new_tokens, 0) << info.name;
    if (!info.score) continue;
    // No answer, long answers and bytes of any kind get a score.
    Task task = task_with(info.name, {"A"}, "trec", {"A"});
    for (const std::string& answer : {std::string(), std::string("\xff\xc3\0{\n", 5),
                                      std::string(20000, ' '), std::string("boxed{{{{")}) {
      const double score = info.score(task, answer);
      EXPECT_TRUE(score >= 0 && score <= 1) << info.name;
    }
  }
}

TEST(Bootstrap, GivesTheSameIntervalEverywhere) {
  const std::vector<double> values = {0, 1, 1, 1, 0, 1, 0.5};
  const Interval interval = bootstrap_mean(values, 1);
  EXPECT_DOUBLE_EQ(interval.mean, 4.5 / 7);
  EXPECT_DOUBLE_EQ(interval.low, 2.0 / 7);
  EXPECT_DOUBLE_EQ(interval.high, 6.5 / 7);
  EXPECT_EQ(bootstrap_mean(values, 1).high, interval.high);
  const Interval narrow = bootstrap_mean(values, 1, 0.5);
  EXPECT_GT(narrow.low, interval.low);
  EXPECT_LT(narrow.high, interval.high);

  // Values that no sum of which is exact.
  for (const double value : {0.1, 1.0 / 3, 1.0, 0.0}) {
    const Interval same = bootstrap_mean(std::vector<double>(37, value), 3);
    EXPECT_EQ(same.mean, value);
    EXPECT_EQ(same.low, value);
    EXPECT_EQ(same.high, value);
  }
  const Interval one = bootstrap_mean({0.3}, 9);
  EXPECT_EQ(one.low, 0.3);
  EXPECT_TRUE(std::isnan(bootstrap_mean({}, 1).mean));
  // What cannot be put in order has no quantiles.
  EXPECT_TRUE(std::isnan(bootstrap_mean({0, std::nan(""), 1}, 1).low));

  // Of 100 tries, half of them right: the interval of the normal distribution, 1.96 * 0.05.
  std::vector<double> halves(100, 0);
  std::fill(halves.begin(), halves.begin() + 50, 1);
  const Interval normal = bootstrap_mean(halves, 5, 0.95, 20000);
  EXPECT_NEAR(normal.low, 0.402, 0.011);
  EXPECT_NEAR(normal.high, 0.598, 0.011);
  test::expect_error([] { (void)bootstrap_mean({1}, 1, 1); }, {"share"});
  test::expect_error([] { (void)bootstrap_mean({1}, 1, 0.5, 0); }, {"resamples"});
}

TEST(Wilson, HasAWidthAtTheEnds) {
  const auto expect = [](std::int64_t right, std::int64_t n, double low, double high) {
    const Interval interval = wilson_interval(right, n);
    EXPECT_DOUBLE_EQ(interval.mean, static_cast<double>(right) / static_cast<double>(n));
    EXPECT_NEAR(interval.low, low, 1e-6);
    EXPECT_NEAR(interval.high, high, 1e-6);
  };
  expect(5, 5, 0.565518, 1);  // 5 / (5 + z^2)
  expect(0, 10, 0, 0.277533);
  expect(50, 100, 0.403832, 0.596168);
  expect(1, 1, 0.206549, 1);
  EXPECT_EQ(wilson_interval(5, 5).high, 1);
  EXPECT_EQ(wilson_interval(0, 7).low, 0);
  EXPECT_TRUE(std::isnan(wilson_interval(0, 0).mean));
  EXPECT_TRUE(std::isnan(wilson_interval(0, 0).high));
  test::expect_error([] { (void)wilson_interval(3, 2); }, {"right = 3", "n = 2"});
}

TEST(Wilson, IsOfEqualScores) {
  for (const std::size_t n : {1, 2, 7}) {
    for (const double score : {0.5, 0.1, 2.0 / 3}) {
      const Interval interval = mean_of_scores(std::vector<double>(n, score), 3);
      EXPECT_EQ(interval.mean, score);
      EXPECT_LT(interval.low, score - 0.05);
      EXPECT_GT(interval.high, score + 0.05);
      EXPECT_GE(interval.low, 0);
      EXPECT_LE(interval.high, 1);
    }
  }
  EXPECT_NEAR(mean_of_scores({0.5, 0.5}, 3).low, wilson_interval(1, 2).low, 1e-15);
  EXPECT_EQ(mean_of_scores({3, 3}, 3).low, 3);  // no proportion
}

TEST(Wilson, IsOfScoresOfZeroAndOne) {
  EXPECT_EQ(mean_of_scores({1, 0, 1, 1}, 3).low, wilson_interval(3, 4).low);
  EXPECT_EQ(mean_of_scores({1, 1}, 3).low, wilson_interval(2, 2).low);
  EXPECT_EQ(mean_of_scores({1, 0.5, 0}, 3, 50).low, bootstrap_mean({1, 0.5, 0}, 3, 0.95, 50).low);
}

TEST(PassAtK, IsTheUnbiasedEstimate) {
  // 1 - C(n - c, k) / C(n, k)
  EXPECT_NEAR(pass_at_k(10, 3, 5), 1 - 21.0 / 252, 1e-15);
  EXPECT_NEAR(pass_at_k(5, 1, 2), 0.4, 1e-15);
  EXPECT_NEAR(pass_at_k(200, 20, 1), 0.1, 1e-13);
  EXPECT_EQ(pass_at_k(4, 0, 4), 0);
  EXPECT_EQ(pass_at_k(4, 4, 1), 1);
  EXPECT_EQ(pass_at_k(10, 6, 5), 1);
  EXPECT_NEAR(pass_at_k(100000, 1, 50000), 0.5, 1e-9);
  for (const auto& [n, c, k] :
       {std::array<std::int64_t, 3>{3, 1, 4}, {3, 4, 1}, {3, -1, 1}, {3, 1, 0}}) {
    test::expect_error([n = n, c = c, k = k] { (void)pass_at_k(n, c, k); }, {"pass@k"});
  }
}

}  // namespace
}  // namespace kvzap
