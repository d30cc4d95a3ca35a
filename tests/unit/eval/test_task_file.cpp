// Files of tasks: the fields of others that are recognised, and what is refused, where.
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <kvzap/core/types.hpp>
#include <kvzap/lab/metrics.hpp>
#include <kvzap/lab/tasks.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "source_dir.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap {
namespace {

namespace fs = std::filesystem;
using Answers = std::vector<std::string>;

const fs::path task_folder = test::source_dir() / "tests/eval";

class TaskFiles : public ::testing::Test {
 protected:
  TaskFile read(const std::string& content, bool keep_going = false) const {
    m_folder.write("mine.jsonl", content);
    return read_tasks(m_folder.path() / "mine.jsonl", keep_going);
  }
  Task read_one(const std::string& row) const {
    const TaskFile file = read(row);
    EXPECT_EQ(file.tasks.size(), 1u);
    return file.tasks.at(0);
  }
  // The row is refused as line 2, after one that is fine, and skipped when the reader goes on.
  void expect_refused(const std::string& row, std::initializer_list<std::string_view> parts) const {
    const std::string good = R"({"question": "q", "answer": "a"})";
    SCOPED_TRACE(row.substr(0, 200));
    test::expect_error([&] { (void)read(good + "\n" + row); }, {"mine.jsonl: line 2: "});
    test::expect_error([&] { (void)read(good + "\n" + row); }, parts);
    const TaskFile rest = read(good + "\n" + row + "\n" + good, true);
    ASSERT_EQ(rest.tasks.size(), 2u);
    EXPECT_EQ(rest.tasks[1].line, 3);
    ASSERT_EQ(rest.skipped.size(), 1u);
    EXPECT_NE(rest.skipped[0].find("mine.jsonl: line 2: "), std::string::npos) << rest.skipped[0];
    EXPECT_LT(rest.skipped[0].size(), 1000u);
  }

  test::TemporaryFolder m_folder;
};

TEST_F(TaskFiles, ReadsKvpressColumns) {
  const Task task = read_one(
      R"({"task": "qa_1", "context": "c", "question": "q", "answer": ["x", "y"], "answer_prefix": )"
      R"("p", "max_new_tokens": 24.0, "metric": "exact", "all_classes": ["x", "z"], "index": 7, )"
      R"("length": 12, "unknown": {"a": []}})");
  EXPECT_EQ(task.task, "qa_1");
  EXPECT_EQ(task.context, "c");
  EXPECT_EQ(task.question, "q");
  EXPECT_EQ(task.answer_prefix, "p");
  EXPECT_EQ(task.answers, (Answers{"x", "y"}));
  EXPECT_EQ(task.max_new_tokens, 24);
  EXPECT_EQ(task.metric, "exact");
  EXPECT_EQ(task.classes, (Answers{"x", "z"}));
  EXPECT_EQ(task.id, "7");
  EXPECT_EQ(task.line, 1);

  // Numbers are answers too, null is no field but of the prompt, and the file names the task that
  // has no name.
  const Task sparse = read_one(
      R"({"context": "", "question": "q", "answers": [70, 0.5, "s"], "max_new_tokens": null})");
  EXPECT_EQ(sparse.answers, (Answers{"70", "0.5", "s"}));
  EXPECT_EQ(sparse.task, "mine");
  EXPECT_EQ(sparse.max_new_tokens, 128);
  try {
    read_one(R"({"context": null, "question": "q", "answers": ["s"]})");
    FAIL();
  } catch (const kvzap::Error& error) {
    EXPECT_NE(std::string(error.what()).find("line 1: context: expected a string, found null"),
              std::string::npos)
        << error.what();
  }
}

TEST_F(TaskFiles, WritesWhatItReads) {
  Task task;
  task.task = "t\"\n\u2028\U0001F600";
  task.context = "line\nline\t\\";
  task.answers = {"one", "two"};
  task.answer_prefix = " is";
  task.max_new_tokens = 5;
  task.metric = "classification";
  task.classes = {"one", "two"};
  task.id = "9";
  for (const Answers& answers : {Answers{"one", "two"}, Answers{"one"}}) {
    task.answers = answers;
    const std::string line = to_json_line(task);
    EXPECT_EQ(line.find('\n'), std::string::npos);
    const Task copy = read_one(line);
    EXPECT_EQ(to_json_line(copy), line);
    EXPECT_EQ(copy.task, task.task);
    EXPECT_EQ(copy.context, task.context);
    EXPECT_EQ(copy.answers, task.answers);
    EXPECT_EQ(copy.id, task.id);
  }
}

TEST_F(TaskFiles, ReadsRulersRows) {
  fs::create_directory(m_folder.path() / "qa_2");
  m_folder.write("qa_2/validation.jsonl",
                 R"({"index": 3, "input": "whole prompt", "outputs": ["Rouen"], "length": 4096, )"
                 R"("length_w_model_temp": 4120, "answer_prefix": " Answer:"})");
  const Task task = read_tasks(m_folder.path() / "qa_2/validation.jsonl", false).tasks.at(0);
  EXPECT_EQ(task.task, "qa_2");
  EXPECT_EQ(task.context, "whole prompt");
  EXPECT_EQ(task.question, "");
  EXPECT_EQ(task.answer_prefix, " Answer:");
  EXPECT_EQ(task.answers, Answers{"Rouen"});
  EXPECT_EQ(task.max_new_tokens, 32);
  EXPECT_EQ(metric_of(task).name, "string_match_part");
}

TEST_F(TaskFiles, ReadsLongBenchsRows) {
  const TaskFile plain = read_tasks(task_folder / "longbench.jsonl", false);
  ASSERT_EQ(plain.tasks.size(), 3u);
  EXPECT_EQ(plain.tasks[0].question,
            "Which river does the town where the clockmaker was born lie on?");
  EXPECT_EQ(plain.tasks[0].answers, (Answers{"Aare", "the Aare"}));
  EXPECT_EQ(plain.tasks[0].id, "b6d1c0a2");
  const std::vector<std::string> names = {"token_f1", "classification", "count"};
  const std::vector<std::int64_t> tokens = {32, 64, 32};
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(metric_of(plain.tasks[i]).name, names[i]);
    EXPECT_EQ(plain.tasks[i].max_new_tokens, tokens[i]);
  }

  const PromptTemplates templates = read_prompt_templates(task_folder / "longbench_prompts.json");
  const TaskFile asked = read_tasks(task_folder / "longbench.jsonl", false, templates);
  EXPECT_EQ(asked.tasks[0].context, "Answer from these passages.\n" + plain.tasks[0].context);
  EXPECT_EQ(asked.tasks[0].question, "\n\nQuestion: " + plain.tasks[0].question + "\nAnswer:");
  EXPECT_EQ(asked.tasks[1].question, "\n" + plain.tasks[1].question);
  EXPECT_EQ(asked.tasks[2].question, "\nHow many different paragraphs are there? The number is: ");
  EXPECT_EQ(asked.hash, plain.hash);
  test::expect_error(
      [&] {
        (void)read_tasks(task_folder / "longbench.jsonl", false, {{"trecc", "{input}"}});
      },
      {"longbench.jsonl: line 1: task: ", "hotpotqa"});
}

TEST_F(TaskFiles, ReadsAimesRows) {
  const PromptTemplates templates = read_prompt_templates(task_folder / "aime_prompts.json");
  const TaskFile file = read_tasks(task_folder / "aime.jsonl", false, templates);
  ASSERT_EQ(file.tasks.size(), 2u);
  EXPECT_EQ(file.tasks[0].context, "");
  EXPECT_EQ(file.tasks[0].question.substr(0, 4), "Find");
  EXPECT_NE(file.tasks[0].question.find("6$.\nThink step by step"), std::string::npos);
  EXPECT_EQ(file.tasks[0].answers, Answers{"17"});
  EXPECT_EQ(file.tasks[0].max_new_tokens, 32000);
  EXPECT_EQ(metric_of(file.tasks[1]).name, "boxed_integer");
  EXPECT_EQ(metric_of(file.tasks[1]).score(file.tasks[1], "Thus \\boxed{9}."), 1);
  const Task aime25 =
      read_one(R"({"task": "aime25", "context": "", "question": "q", "answer": "70"})");
  EXPECT_EQ(metric_of(aime25).name, "boxed_integer");
}

TEST_F(TaskFiles, PutsChoicesIntoTheQuestion) {
  const std::string row =
      R"({"_id": "x", "context": "c", "question": "Who?", "choice_A": "a", "choice_B": "b", )"
      R"("choice_C": "c", "choice_D": "d", "answer": "C", "length": "short"})";
  const Task task = read_one(row);
  EXPECT_EQ(task.question.substr(0, 35), "Who?\nChoices:\n(A) a\n(B) b\n(C) c\n(D)");
  EXPECT_EQ(metric_of(task).name, "stated_choice");
  // Not a second time.
  EXPECT_EQ(
      read_one(R"({"question": "Who?\nChoices:\n(A) a\n(B) b\n(C) c\n(D) d", "choice_A": "a",)"
               R"("choice_B": "b", "choice_C": "c", "choice_D": "d", "answer": "C"})")
          .question,
      "Who?\nChoices:\n(A) a\n(B) b\n(C) c\n(D) d");
}

TEST_F(TaskFiles, TakesByteOrderMarkAndOtherLineEnds) {
  const std::string row = R"({"question": "q", "answer": "a"})";
  const TaskFile file = read("\xEF\xBB\xBF" + row + "\r\n\r\n \t\n" + row + "\r\n" + row);
  ASSERT_EQ(file.tasks.size(), 3u);
  EXPECT_EQ(file.tasks[1].line, 4);
  EXPECT_EQ(file.tasks[2].line, 5);
  EXPECT_NE(file.hash, read(row).hash);
  EXPECT_EQ(read(row).hash, read(row).hash);
  // Longer than the blocks in which the file is read.
  const std::string text(3 << 20, 'x');
  const TaskFile large = read(row + "\n" + R"({"question": ")" + text + R"(", "answer": "a"})");
  ASSERT_EQ(large.tasks.size(), 2u);
  EXPECT_EQ(large.tasks[1].question, text);
}

TEST_F(TaskFiles, RefusesWhatIsNoTask) {
  expect_refused("{\"question\": \"q\xFF\", \"answer\": \"a\"}", {"UTF-8"});
  expect_refused(R"({"question": "\ud800", "answer": "a"})", {"not valid JSON"});
  expect_refused(R"({"question": "q", "answer": "a")", {"not valid JSON"});
  expect_refused("{\"question\": \"" + std::string(100000, 'x'), {"not valid JSON"});
  expect_refused(R"([1, 2])", {"expected a JSON object, found array"});
  expect_refused(R"({"question": "q", "answer": "a", "x": )" + std::string(1000, '[') +
                     std::string(1000, ']') + "}",
                 {"nested too deeply"});
  expect_refused(R"({"question": "q", "answer": "a", "answer": "b"})",
                 {"'answer'", "more than once"});
  expect_refused(R"({"context": "c", "answer": "a"})", {"question: expected a string, found no"});
  expect_refused(R"({"context": "c", "question": "q"})", {"answer or answers: expected"});
  expect_refused(R"({"input": "i", "context": "c"})", {"answers: expected"});
  expect_refused(R"({"input": "i", "answers": ["a"]})", {"context: expected a string, found no"});
  expect_refused(R"({"outputs": ["a"]})", {"input: expected a string, found no", "RULER"});
  expect_refused(R"({"context": "", "question": "", "answer": "a"})",
                 {"context: expected a prompt"});
  expect_refused(R"({"question": "q", "answer": "a", "answers": ["a"]})",
                 {"both answer and answers"});
  expect_refused(R"({"question": "q", "answer": "a", "input": "i"})", {"question: ", "LongBench"});
  expect_refused(R"({"input": "i", "outputs": ["a"], "context": "c"})", {"context: ", "RULER"});
  expect_refused(R"({"problem": "p", "answer": 1, "question": "q"})", {"question: ", "AIME"});
  expect_refused(R"({"question": 1, "answer": "a"})", {"question: expected a string, found 1"});
  expect_refused(R"({"question": "q", "answer": []})", {"answer: expected at least one"});
  expect_refused(R"({"question": "q", "answer": true})", {"answer: expected a string, a number"});
  expect_refused(R"({"question": "q", "answer": ["a", {}]})", {"answer[1]: expected a string"});
  expect_refused(R"({"question": "q", "answer": "a", "all_classes": ["x", 1]})",
                 {"all_classes[1]: expected a string, found 1"});
  expect_refused(R"({"question": "q", "answer": "a", "id": {}})", {"id: expected"});
  for (const char* number : {"0", "-3", "1.5", "1e300", "9223372036854775807", "\"5\"", "true"}) {
    expect_refused(
        R"({"question": "q", "answer": "a", "max_new_tokens": )" + std::string(number) + "}",
        {"max_new_tokens: expected a whole number from 1 to 1048576, found "});
  }
  expect_refused(R"({"question": "q", "answer": "a", "metric": "rouge"})",
                 {"metric: expected one of", "found rouge; did you mean rouge_l?"});
  expect_refused(R"({"question": "q", "answer": "a", "task": "dureader"})",
                 {"metric: expected one for task dureader", "char_f1"});
  expect_refused(R"({"question": "q", "answer": "a", "task": "trec"})", {"all_classes: expected"});
}

TEST_F(TaskFiles, RefusesFilesWithoutTasks) {
  const std::string none = "expected a task in each line";
  test::expect_error([&] { (void)read(""); }, {"mine.jsonl: ", none});
  test::expect_error([&] { (void)read("\xEF\xBB\xBF\r\n\n"); }, {none});
  test::expect_error([&] { (void)read("{}\n[]", true); }, {none, "mine.jsonl: line 1: question"});
  test::expect_error([&] { (void)read_tasks(m_folder.path(), false); }, {"cannot be read"});
  test::expect_error([&] { (void)read_tasks(m_folder.path() / "no", false); }, {"cannot be read"});
  m_folder.write("prompts.json", R"({"a": "{context}", "b": "no place"})");
  test::expect_error([&] { (void)read_prompt_templates(m_folder.path() / "prompts.json"); },
                     {"prompts.json: b: expected a text with {context} or {input}"});
  m_folder.write("prompts.json", R"({"a": "{context} {input} {context}"})");
  test::expect_error([&] { (void)read_prompt_templates(m_folder.path() / "prompts.json"); },
                     {"prompts.json: a: expected a text with {context} once"});
}

}  // namespace
}  // namespace kvzap
