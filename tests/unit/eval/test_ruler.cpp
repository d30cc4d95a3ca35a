#include "eval/ruler.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <kvzap/lab/metrics.hpp>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <set>
#include <sstream>

#include "eval/long_answers.hpp"
#include "eval/recall.hpp"
#include "eval/words.hpp"
#include "source_dir.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using kvzap::ChatTemplate;
using kvzap::Tokenizer;
using kvzap::eval::FittedContext;
using kvzap::eval::MadeTask;
using kvzap::eval::PromptMeter;
using kvzap::eval::Prose;
using kvzap::eval::QuestionFile;
using kvzap::eval::Ruler;
using kvzap::eval::ruler_task_names;
using kvzap::eval::TooShort;
using kvzap::test::expect_error;
using kvzap::test::TemporaryFolder;

const std::string model_folder = kvzap::test::source_dir().string() + "/inputs/models/recall-4m";

const Tokenizer& demo_tokenizer() {
  static const Tokenizer tokenizer = Tokenizer::load(model_folder);
  return tokenizer;
}

ChatTemplate::Parts demo_parts() { return ChatTemplate::detect(model_folder).parts(false); }

const PromptMeter& demo_meter() {
  static const PromptMeter meter(demo_tokenizer(), demo_parts());
  return meter;
}

int occurrences(const std::string& text, const std::string& part) {
  int count = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

/// All matches of a pattern's groups.
std::vector<std::vector<std::string>> matches(const std::string& text, const std::string& pattern) {
  const std::regex regex(pattern);
  std::vector<std::vector<std::string>> found;
  for (std::sregex_iterator match(text.begin(), text.end(), regex), end; match != end; ++match) {
    found.emplace_back();
    for (std::size_t i = 1; i < match->size(); ++i) found.back().push_back(match->str(i));
  }
  return found;
}

template <class T>
std::set<T> as_set(const std::vector<T>& values) {
  return {values.begin(), values.end()};
}

/// 40 paragraphs in two articles, with a question each that its number answers.
QuestionFile made_up_questions() {
  QuestionFile file;
  file.name = "questions.json";
  for (std::uint32_t i = 0; i < 40; ++i) {
    file.documents.push_back(
        fmt::format("Town {} has its market on day {}. It is far from here.", i, 100 + i));
    QuestionFile::Question question;
    question.text = fmt::format("On which day does town {} have its market?", i);
    question.answers = {fmt::format("day {}", 100 + i), fmt::format("{}", 100 + i)};
    question.documents = {i};
    question.article = i / 20;
    file.articles.resize(i / 20 + 1);
    file.articles.back().push_back(i);
    file.questions.push_back(question);
  }
  return file;
}

Ruler make_ruler(const PromptMeter& meter, std::uint64_t seed = 1) {
  return {meter, Prose::built_in(), {made_up_questions(), made_up_questions()}, seed};
}

TEST(RulerTasks, AreThoseOfThePaper) {
  const std::vector<std::string> names = {"niah_single_1",
                                          "niah_single_2",
                                          "niah_single_3",
                                          "niah_multikey_1",
                                          "niah_multikey_2",
                                          "niah_multikey_3",
                                          "niah_multivalue",
                                          "niah_multiquery",
                                          "vt",
                                          "cwe",
                                          "fwe",
                                          "qa_1",
                                          "qa_2"};
  EXPECT_EQ(ruler_task_names(), names);
}

struct NeedleCase {
  const char* task;
  std::string kind, key, value;  // patterns
  std::size_t needles;           // 0: as many as fit
  std::size_t keys_asked, answers;
};

TEST(RulerTasks, HideEachNeedleOnce) {
  const std::string words = "[a-z]+-[a-z]+", number = "[1-9][0-9]{6}",
                    uuid = "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}";
  const std::vector<NeedleCase> cases = {{"niah_single_1", "number", words, number, 1, 1, 1},
                                         {"niah_single_2", "number", words, number, 1, 1, 1},
                                         {"niah_single_3", "uuid", words, uuid, 1, 1, 1},
                                         {"niah_multikey_1", "number", words, number, 4, 1, 1},
                                         {"niah_multikey_2", "number", words, number, 0, 1, 1},
                                         {"niah_multikey_3", "uuid", uuid, uuid, 0, 1, 1},
                                         {"niah_multivalue", "number", words, number, 4, 1, 4},
                                         {"niah_multiquery", "number", words, number, 4, 4, 4}};
  Ruler ruler = make_ruler(demo_meter());
  for (const NeedleCase& expected : cases) {
    for (int index = 0; index < 3; ++index) {
      SCOPED_TRACE(fmt::format("{} {}", expected.task, index));
      const auto task = ruler.make(expected.task, 1500, index).task;
      const auto needles =
          matches(task.context, fmt::format("One of the special magic {}s for ({}) is: ({})\\.",
                                            expected.kind, expected.key, expected.value));
      if (expected.needles > 0) {
        EXPECT_EQ(needles.size(), expected.needles);
      } else {
        EXPECT_GT(needles.size(), 10u);
      }
      std::map<std::string, std::vector<std::string>> values_of;
      std::set<std::string> all_values;
      for (const auto& needle : needles) {
        values_of[needle[0]].push_back(needle[1]);
        EXPECT_TRUE(all_values.insert(needle[1]).second) << needle[1];
      }
      const bool many_values = std::string(expected.task) == "niah_multivalue";
      EXPECT_EQ(values_of.size(), many_values ? 1 : needles.size());

      EXPECT_EQ(task.answers.size(), expected.answers);
      const std::string plural = expected.answers > 1 ? expected.kind + "s" : expected.kind;
      const auto asked = matches(
          task.question, fmt::format("{} for (.*) mentioned in the provided text\\?$", plural));
      ASSERT_EQ(asked.size(), 1u) << task.question;
      EXPECT_EQ(task.answer_prefix,
                fmt::format(" The special magic {} for {} mentioned in the provided text {}",
                            plural, asked[0][0], expected.answers > 1 ? "are" : "is"));
      std::vector<std::string> keys, answers;
      for (const auto& key : matches(asked[0][0], "(" + expected.key + ")")) keys.push_back(key[0]);
      EXPECT_EQ(keys.size(), expected.keys_asked);
      for (const auto& key : keys) {
        answers.insert(answers.end(), values_of[key].begin(), values_of[key].end());
      }
      EXPECT_EQ(as_set(answers), as_set(task.answers));
      if (expected.keys_asked > 1) {
        EXPECT_EQ(answers, task.answers);  // in the order of the keys
      }
      for (const auto& answer : task.answers) {
        EXPECT_EQ(occurrences(task.context, answer), 1);
        EXPECT_EQ(task.question.find(answer), std::string::npos);
      }
      EXPECT_EQ(task.max_new_tokens, 128);
      EXPECT_EQ(kvzap::metric_of(task).name, "string_match_all");
    }
  }
}

TEST(RulerTasks, HideNeedlesAtAllDepths) {
  Ruler ruler = make_ruler(demo_meter());
  for (const char* name : {"niah_single_1", "niah_single_2", "niah_multikey_2"}) {
    std::set<int> quarters;
    for (int index = 0; index < 30; ++index) {
      const auto task = ruler.make(name, 1200, index).task;
      quarters.insert(
          static_cast<int>(4 * task.context.find(task.answers[0]) / task.context.size()));
    }
    EXPECT_EQ(quarters.size(), 4u) << name;
  }
}

TEST(RulerTasks, ChainsOfVariablesCanBeFollowed) {
  Ruler ruler = make_ruler(demo_meter());
  for (int index = 0; index < 5; ++index) {
    const auto task = ruler.make("vt", 1200, index).task;
    const std::string value = matches(task.question, "the value ([0-9]{5}) in")[0][0];
    std::vector<std::string> chain;
    // The example's names have three letters.
    for (const auto& line : matches(task.context, "(?:^|\n)VAR ([A-Z]{5}) = (.*)")) {
      EXPECT_EQ(line[1], chain.empty() ? value : "VAR " + chain.back());
      chain.push_back(line[0]);
    }
    EXPECT_EQ(chain, task.answers);
    EXPECT_EQ(as_set(chain).size(), 5u);
    EXPECT_EQ(matches(task.context, "(?:^|\n)VAR ([A-Z]{3}) = ").size(), 5u);
    EXPECT_EQ(occurrences(task.context, value), 1);
    EXPECT_EQ(task.answer_prefix.substr(task.answer_prefix.size() - 11), " they are: ");
    EXPECT_EQ(task.max_new_tokens, 30);
  }
}

TEST(RulerTasks, CommonWordsAreTheMostFrequent) {
  Ruler ruler = make_ruler(demo_meter());
  // (length, how often a common word and another one are there)
  for (const auto& [length, common, other] : {std::tuple(2048, 6, 1), std::tuple(8192, 30, 3)}) {
    const auto task = ruler.make("cwe", length, 0).task;
    const auto list = task.context.rfind("\n1. ");
    ASSERT_NE(list, std::string::npos);
    std::map<std::string, int> counts;
    int number = 0;
    for (const auto& entry : matches(task.context.substr(list), "([0-9]+)\\. ([a-z-]+)")) {
      EXPECT_EQ(entry[0], std::to_string(++number));
      ++counts[entry[1]];
    }
    EXPECT_GT(number, 10 * common + 10 * other);
    EXPECT_EQ(task.answers.size(), 10u);
    std::size_t others_as_often = 0;
    for (const auto& [word, count] : counts) {
      const bool is_common =
          std::find(task.answers.begin(), task.answers.end(), word) != task.answers.end();
      EXPECT_TRUE(is_common ? count == common : count <= other) << word;
      if (!is_common && count == other) ++others_as_often;
    }
    EXPECT_GE(others_as_often + 11, counts.size());  // but for the last
    for (const auto& answer : task.answers) EXPECT_EQ(counts.count(answer), 1u);
  }
}

TEST(RulerTasks, LongListsHavePairsOfWords) {
  Ruler ruler = make_ruler(demo_meter());
  const MadeTask made = ruler.make("cwe", 65536, 0);
  EXPECT_NE(made.task.answers[0].find('-'), std::string::npos);
  EXPECT_GT(made.tokens, 65536 - 120 - 20);
}

TEST(RulerTasks, FrequentWordsFollowZipfsLaw) {
  Ruler ruler = make_ruler(demo_meter());
  for (const int length : {1024, 4096}) {
    const auto task = ruler.make("fwe", length, 0).task;
    std::map<std::string, int> counts;
    std::istringstream text(task.context.substr(task.context.find("often. ") + 7));
    int words = 0;
    for (std::string word; text >> word; ++words) ++counts[word];
    std::vector<std::pair<int, std::string>> ranks;
    for (const auto& [word, count] : counts) ranks.emplace_back(-count, word);
    std::sort(ranks.begin(), ranks.end());
    EXPECT_EQ(ranks[0].second, "...");
    for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(ranks[i + 1].second, task.answers[i]);
    for (std::size_t i = 0; i < 4; ++i) EXPECT_LT(ranks[i].first, ranks[i + 1].first) << i;
    for (std::size_t i = 1; i < ranks.size(); ++i) {
      // Of N words of all ranks N / (k^2 zeta(2)) have rank k; those of the far ranks are missing.
      const double k = static_cast<double>(i + 1);
      EXPECT_NEAR(-ranks[i].first * k * k * 1.6449, words, 0.12 * words + k * k * 1.6449) << i;
    }
  }
}

TEST(RulerTasks, QuestionsStandAmongOtherDocuments) {
  Ruler ruler = make_ruler(demo_meter());
  std::set<std::string> questions;
  for (int index = 0; index < 40; ++index) {
    const auto made = ruler.make("qa_1", 900, index);
    const auto& task = made.task;
    EXPECT_EQ(occurrences(task.context, " " + task.answers[0] + "."), 1);
    EXPECT_EQ(task.answers.size(), 2u);
    EXPECT_NE(task.question.find("\n\nQuestion: On which day"), std::string::npos);
    EXPECT_EQ(kvzap::metric_of(task).name, "string_match_part");
    const auto documents = matches(task.context, "(?:^|\n\n)Document ([0-9]+):\nTown");
    ASSERT_GT(documents.size(), 5u);
    for (std::size_t i = 0; i < documents.size(); ++i) {
      EXPECT_EQ(documents[i][0], std::to_string(i + 1));
    }
    questions.insert(task.question);
  }
  // Each is asked before one is asked again; then they stand elsewhere.
  EXPECT_EQ(questions.size(), 40u);
  const auto first = ruler.make("qa_1", 900, 0).task, again = ruler.make("qa_1", 900, 40).task;
  EXPECT_EQ(first.question, again.question);
  EXPECT_NE(first.context, again.context);
  EXPECT_EQ(ruler.different_rows("qa_1", 900), 40);
  // More documents than there are.
  EXPECT_GT(occurrences(ruler.make("qa_2", 4096, 0).task.context, "Town 0 has"), 1);
}

/// As kvzap run encodes it.
std::int64_t prompt_tokens(const Tokenizer& tokenizer, const kvzap::Task& task,
                           const std::optional<ChatTemplate::Parts>& parts) {
  const auto context =
      parts ? tokenizer.encode(parts->context(task.context)) : tokenizer.encode(task.context, true);
  const auto question =
      tokenizer.encode(task.question + (parts ? parts->suffix : "") + task.answer_prefix);
  return static_cast<std::int64_t>(context.size() + question.size());
}

TEST(RulerLength, IsMetByEveryTask) {
  const auto qwen =
      Tokenizer::load(kvzap::test::source_dir().string() + "/tests/golden/tokenizer/qwen2");
  struct {
    const Tokenizer& tokenizer;
    std::optional<ChatTemplate::Parts> parts;
    std::vector<std::int64_t> lengths;
    std::int64_t tolerance;
  } const cases[] = {{demo_tokenizer(), demo_parts(), {1024, 2049, 4096}, 15},
                     {demo_tokenizer(), std::nullopt, {1500}, 15},
                     {qwen, std::nullopt, {4096}, 20}};  // 556 tokens, hardly any whole word
  for (const auto& with : cases) {
    const PromptMeter meter(with.tokenizer, with.parts);
    Ruler ruler = make_ruler(meter);
    for (const std::int64_t length : with.lengths) {
      for (const auto& name : ruler_task_names()) {
        if (name == "cwe" && length < 1500) continue;  // takes more
        const MadeTask made = ruler.make(name, length, 0);
        EXPECT_EQ(made.tokens, prompt_tokens(with.tokenizer, made.task, with.parts));
        const std::int64_t all = made.tokens + made.task.max_new_tokens;
        EXPECT_LE(all, length) << name;
        EXPECT_GE(all, length - with.tolerance) << name << " of " << length;
      }
    }
  }
}

TEST(RulerLength, TooShortSaysTheLeast) {
  Ruler ruler = make_ruler(demo_meter());
  for (const auto& name : ruler_task_names()) {
    std::int64_t least = 0;
    try {
      ruler.make(name, 60, 0);
      ADD_FAILURE() << name;
    } catch (const TooShort& error) {
      const auto said = matches(error.what(), "(?:at least|less than) ([0-9]+) tokens");
      ASSERT_EQ(said.size(), 1u) << error.what();
      least = std::stoll(said[0][0]);
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos);
    }
    // Other draws may take some tokens more, and the example of vt grows with the length.
    EXPECT_NO_THROW(ruler.make(name, least + least / 4 + 20, 0)) << name;
  }
}

TEST(RulerLength, TakesFewEncodings) {
  int calls = 0;
  const FittedContext fitted = fit_context(demo_meter(), 30000, 1, 1 << 30, [&](std::int64_t size) {
    ++calls;
    std::string text;
    for (std::int64_t i = 0; i < size; ++i) text += i % 7 == 0 ? " extraordinary" : " road";
    return text;
  });
  EXPECT_LE(fitted.tokens, 30000);
  EXPECT_GT(fitted.tokens, 29990);
  EXPECT_LE(calls, 9);
}

TEST(RulerLength, EndsWhereTheSizeDoes) {
  const auto line = [](std::int64_t size) {
    return std::string(static_cast<std::size_t>(size), '.');
  };
  EXPECT_EQ(fit_context(demo_meter(), 10000, 1, 12, line).size, 12);
  EXPECT_EQ(fit_context(demo_meter(), 10000, 12, 12, line).size, 12);
  // Whatever is done does not lengthen it.
  const auto same = [](std::int64_t /*size*/) { return std::string("a"); };
  EXPECT_EQ(fit_context(demo_meter(), 10000, 1, 1000, same).size, 1000);
}

TEST(RulerRows, DependOnNothingButTheirPlace) {
  Ruler all = make_ruler(demo_meter()), one = make_ruler(demo_meter());
  Ruler other = make_ruler(demo_meter(), 2);
  for (const auto& name : ruler_task_names()) {
    std::vector<std::string> rows;
    for (int index = 0; index < 3; ++index)
      rows.push_back(to_json_line(all.make(name, 2048, index)));
    EXPECT_EQ(as_set(rows).size(), 3u) << name;
    EXPECT_EQ(to_json_line(one.make(name, 2048, 2)), rows[2]) << name;
    EXPECT_EQ(to_json_line(one.make(name, 2048, 0)), rows[0]) << name;
    EXPECT_NE(other.make(name, 2048, 0).task.context, all.make(name, 2048, 0).task.context) << name;
    EXPECT_NE(all.make(name, 2047, 0).task.context, all.make(name, 2048, 0).task.context) << name;
  }
}

// The same on every platform and with every standard library.
TEST(RulerRows, AreTheseForThisSeed) {
  Ruler ruler = make_ruler(demo_meter(), 7);
  std::vector<std::string> answers;
  for (const char* name : {"niah_single_1", "niah_single_3", "vt", "cwe", "fwe", "qa_1"}) {
    answers.push_back(ruler.make(name, 2048, 0).task.answers[0]);
  }
  answers.push_back(kvzap::eval::make_recall(demo_meter(), 7, "facts", 300, 0).task.answers[0]);
  const std::vector<std::string> expected = {
      "8149855", "3fcd0367-d0f9-4121-894f-b7585ef8474d",         "EXVGA", "complete", "qweqta",
      "day 117", "In the house of grove there is a brown tower."};
  EXPECT_EQ(answers, expected);
}

TEST(RulerRows, SayWhatTheyAreMadeOf) {
  Ruler ruler = make_ruler(demo_meter());
  const auto row = nlohmann::json::parse(to_json_line(ruler.make("niah_single_2", 1024, 3)));
  EXPECT_EQ(row["task"], "niah_single_2");
  EXPECT_EQ(row["length"], 1024);
  EXPECT_LE(row["tokens"], 1024 - 128);
  EXPECT_EQ(row["haystack"], "built-in");
  EXPECT_EQ(row["id"], "niah_single_2/1024/3");
  EXPECT_EQ(row["max_new_tokens"], 128);
}

TEST(RulerHaystack, MayBeAnyText) {
  const TemporaryFolder folder;
  // Words without spaces, and no end of a sentence anywhere.
  std::string text;
  for (int i = 0; i < 300; ++i) text += "\u6f22\u5b57";
  folder.write("long.txt", text + " fin");
  const Prose prose = Prose::of_file(folder.path() / "long.txt");
  EXPECT_EQ(prose.name(), "long.txt");
  EXPECT_EQ(prose.with_needles(0, 2, {}, {}), text.substr(0, 60));  // two times 10 characters
  EXPECT_EQ(prose.with_needles(0, 62, {}, {}).substr(0, text.size() + 5), text + " fin ");

  const Prose sentences("One two. Three\n\n\"four!\" Five", "x");
  EXPECT_EQ(sentences.with_needles(0, 5, {"A", "B", "C"}, {0, 0.5, 1}),
            "A One two. B Three \"four!\" Five C");
  EXPECT_EQ(sentences.with_needles(1, 5, {}, {}), "Three \"four!\" Five One two.");
  EXPECT_EQ(sentences.with_needles(5, 1, {}, {}), "Five");
  // A text ends a sentence each time, even if nothing in it does.
  EXPECT_EQ(Prose("one two", "x").with_needles(0, 4, {"A"}, {0.5}), "one two A one two");

  Ruler ruler(demo_meter(), prose, {}, 1);
  EXPECT_FALSE(ruler.can_make("qa_1"));
  const auto made = ruler.make("niah_multikey_1", 1024, 0);
  EXPECT_EQ(occurrences(made.task.context, "special magic numbers for"), 4);
  EXPECT_EQ(made.haystack, "long.txt");

  folder.write("empty.txt", " \n\t ");
  folder.write("bytes.txt", "abc \xff def.");
  for (const char* name : {"empty.txt", "bytes.txt", "absent.txt", "."}) {
    expect_error([&] { Prose::of_file(folder.path() / name); }, {name});
  }
}

TEST(RulerHaystack, MayNotEndTheMessage) {
  Ruler ruler(demo_meter(), Prose("Well. This <|im_end|> is it.", "bad.txt"), {}, 1);
  expect_error([&] { ruler.make("niah_single_2", 1024, 0); }, {"bad.txt", "<|im_end|>", "special"});
  EXPECT_NO_THROW(ruler.make("niah_single_1", 1024, 0));
}

TEST(RulerQuestions, AreReadFromBothFormats) {
  const TemporaryFolder folder;
  folder.write("squad.json", R"({"version": "v2.0", "data": [{"title": "T", "paragraphs": [
    {"context": "One.", "qas": [
      {"question": "Q1", "answers": [{"text": "a"}, {"text": "b"}, {"text": "a"}]},
      {"question": "Q2", "is_impossible": true, "answers": []},
      {"question": "Q3", "is_impossible": false, "answers": [{"text": ""}, {"text": " "}]}]},
    {"context": "Two.", "qas": []},
    {"context": "One.", "qas": []}]}]})");
  const QuestionFile squad = kvzap::eval::read_questions(folder.path() / "squad.json");
  EXPECT_EQ(squad.documents, (std::vector<std::string>{"One.", "Two."}));
  ASSERT_EQ(squad.questions.size(), 1u);
  EXPECT_EQ(squad.questions[0].answers, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(squad.questions[0].documents, std::vector<std::uint32_t>{0});
  EXPECT_EQ(squad.questions[0].article, 0u);
  EXPECT_EQ(squad.articles, (std::vector<std::vector<std::uint32_t>>{{0, 1}}));

  folder.write("hotpot.json", R"([{"question": "Q", "answer": "yes", "context":
    [["A", ["One. ", "Two."]], ["B", ["Three."]]]}])");
  const QuestionFile hotpot = kvzap::eval::read_questions(folder.path() / "hotpot.json");
  EXPECT_EQ(hotpot.documents, (std::vector<std::string>{"A\nOne. Two.", "B\nThree."}));
  ASSERT_EQ(hotpot.questions.size(), 1u);
  EXPECT_EQ(hotpot.questions[0].documents, (std::vector<std::uint32_t>{0, 1}));
}

TEST(RulerQuestions, TakeNoMoreMemoryInOneArticle) {
  // A whole collection in one article, as others write them: lists of all paragraphs for each
  // question would take gigabytes.
  constexpr int paragraphs = 30000;
  std::string text = R"({"data": [{"paragraphs": [)";
  for (int i = 0; i < paragraphs; ++i) {
    text += fmt::format(
        R"({}{{"context": "Town {}", "qas": [{{"question": "Q{}", "answers": [{{"text": "{}"}}]}}]}})",
        i == 0 ? "" : ",", i, i, i);
  }
  const TemporaryFolder folder;
  folder.write("squad.json", text + "]}]}");
  const QuestionFile file = kvzap::eval::read_questions(folder.path() / "squad.json");
  EXPECT_EQ(file.questions.size(), static_cast<std::size_t>(paragraphs));
  EXPECT_EQ(file.articles.at(0).size(), static_cast<std::size_t>(paragraphs));
}

TEST(RulerHaystack, MayHaveAllWordsInIt) {
  std::string text;
  for (const auto adjective : kvzap::eval::adjectives()) {
    for (const auto noun : kvzap::eval::common_nouns()) {
      text += fmt::format("{}-{} ", adjective, noun);
    }
  }
  Ruler ruler(demo_meter(), Prose(text, "words.txt"), {}, 1);
  expect_error([&] { ruler.make("niah_single_2", 1024, 0); }, {"niah_single_2", "words.txt"});
}

TEST(RecallTasks, AskForWhatIsThere) {
  using kvzap::eval::make_recall;
  const std::map<std::string, std::size_t> things = {
      {"niah_single_noise", 1}, {"niah_single", 1}, {"niah_multikey", 12}, {"facts", 10}};
  for (const auto& name : kvzap::eval::recall_task_names()) {
    for (const std::int64_t length : {256, 512, 3000}) {
      SCOPED_TRACE(fmt::format("{} {}", name, length));
      const MadeTask made = make_recall(demo_meter(), 1, name, length, 0);
      const auto& task = made.task;
      const std::int64_t all =
          prompt_tokens(demo_tokenizer(), task, demo_parts()) + task.max_new_tokens;
      EXPECT_LE(all, length);
      EXPECT_GE(all, length - 3);
      EXPECT_EQ(task.question.substr(0, 2), "\n\n");
      if (name == "facts") {
        EXPECT_EQ(occurrences(task.context, task.answers[0]), 1);
      } else {
        const auto said = matches(task.answers[0], "for ([a-z]+) is ([0-9]{4})\\.");
        ASSERT_EQ(said.size(), 1u);
        EXPECT_EQ(
            occurrences(task.context, fmt::format("One of the special magic numbers for {} is: {}.",
                                                  said[0][0], said[0][1])),
            1);
      }
      const auto needles = matches(task.context, "(?:numbers for|house of) ([a-z]+) ");
      if (name == "niah_dense") {
        EXPECT_GE(needles.size(), length < 3000 ? 9u : 46u);
      } else if (length >= 512) {
        EXPECT_EQ(needles.size(), things.at(name));
      }
      EXPECT_EQ(as_set(needles).size(), needles.size());
    }
    expect_error([&] { make_recall(demo_meter(), 1, name, 30, 0); },
                 {name, "too short", "at least"});
  }
}

TEST(LongAnswers, AreAboutAllOfThePrompt) {
  for (const auto& name : kvzap::eval::long_answer_task_names()) {
    for (const std::int64_t length : {256, 1024, 5000}) {
      SCOPED_TRACE(fmt::format("{} {}", name, length));
      const MadeTask made = kvzap::eval::make_long_answer(demo_meter(), 1, name, length, 0);
      const auto& task = made.task;
      const std::int64_t all =
          prompt_tokens(demo_tokenizer(), task, demo_parts()) + task.max_new_tokens;
      EXPECT_LE(all, length);
      EXPECT_GE(all, length - 100);
      EXPECT_GE(10 * task.max_new_tokens, 3 * length);
      EXPECT_EQ(task.metric, "string_match_all");
      EXPECT_GE(task.answers.size(), static_cast<std::size_t>(length / 80));
      if (name == "long_sums") {
        const auto begin = matches(task.context, "^Begin with ([0-9]+)\\.");
        const auto steps = matches(task.context, "Step ([0-9]+): (add|subtract) ([0-9]+)\\.");
        ASSERT_EQ(steps.size(), task.answers.size());
        int sum = std::stoi(begin.at(0)[0]);
        for (std::size_t i = 0; i < steps.size(); ++i) {
          const bool adds = steps[i][1] == "add";
          const int next = sum + (adds ? 1 : -1) * std::stoi(steps[i][2]);
          EXPECT_GE(next, 0);
          EXPECT_EQ(task.answers[i], fmt::format("Step {}: {} {} {} = {}", i + 1, sum,
                                                 adds ? '+' : '-', steps[i][2], next));
          sum = next;
        }
        continue;
      }
      const auto said = matches(task.context, "The number of (the [a-z]+ [a-z]+) is ([0-9]{5})\\.");
      ASSERT_EQ(said.size(), task.answers.size());
      std::map<std::string, std::string> numbers;
      for (const auto& one : said) numbers.emplace(one[0], one[1]);
      EXPECT_EQ(numbers.size(), said.size());
      std::vector<std::string> asked;
      if (name == "long_lookups") {
        for (const auto& one : matches(task.question, "(the [a-z]+ [a-z]+)[,.]")) {
          asked.push_back(numbers.at(one[0]));
        }
      } else {
        for (const auto& one : said) asked.push_back(one[1]);
      }
      EXPECT_EQ(task.answers, asked);
    }
    expect_error([&] { kvzap::eval::make_long_answer(demo_meter(), 1, name, 60, 0); },
                 {name, "too short", "at least"});
  }
}

TEST(Words, AreEachThereOnce) {
  std::set<std::string_view> all;
  std::size_t count = 0;
  for (const auto* list :
       {&kvzap::eval::common_nouns(), &kvzap::eval::adjectives(), &kvzap::eval::verbs()}) {
    EXPECT_GT(list->size(), 250u);
    for (const auto word : *list) {
      EXPECT_EQ(word.find_first_not_of("abcdefghijklmnopqrstuvwxyz"), std::string_view::npos)
          << word;
    }
    all.insert(list->begin(), list->end());
    count += list->size();
  }
  EXPECT_EQ(all.size(), count);
}

TEST(Words, MakeProseWithoutNumbers) {
  const std::string prose = kvzap::eval::made_up_prose(5000);
  EXPECT_GE(1 + std::count(prose.begin(), prose.end(), ' '), 5000);
  EXPECT_EQ(prose.find_first_of("0123456789-"), std::string::npos);
  EXPECT_EQ(matches(prose, "( [NV][ ,.?]|[a-z,] A[ ,.?])").size(), 0u);
  EXPECT_EQ(matches(prose, "( an? ([a-z]+))").size(), matches(prose, "( an? )").size());
  EXPECT_EQ(
      matches(prose, "( a [aeio])").size() + matches(prose, "( an [bcdfgjklmnpqrstvwxyz])").size(),
      0u);
  EXPECT_EQ(matches(prose, "(  )").size(), 0u);
}

}  // namespace
