// The records of an evaluation: what a run that was ended left, other evaluations, full disks.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <fstream>
#include <iterator>

#include "eval/records.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using kvzap::eval::EvalRecord;
using kvzap::eval::EvaluationFolder;
using kvzap::test::expect_error;
using kvzap::test::TemporaryFolder;
using nlohmann::ordered_json;

const std::vector<std::string> labels = {"none", "snapkv@evict-ratio=0.5"};

EvalRecord record(std::int64_t line, const std::string& setting) {
  EvalRecord made;
  made.task_file = "tasks.jsonl";
  made.line = line;
  made.task = "recall";
  made.metric = "string_match_all";
  made.setting = setting;
  made.policy = "snapkv";
  made.answers = {"a \"quoted\"\nanswer \xff", "täst"};
  made.scores = {1, 1.0 / 3};
  made.score = 2.0 / 3;
  made.expected = {"x"};
  made.evict_ratio = 0.1;
  made.kept_rows = {{1, 2}, {3, 4}};
  made.kv_bytes = 1;
  made.nll = 12.5;
  return made;
}

std::vector<std::string> prompt(std::int64_t line) {
  std::vector<std::string> lines;
  for (const auto& label : labels) lines.push_back(record(line, label).to_json_line());
  return lines;
}

std::string content(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

/// Lines of the prompts that are there, and what was cut off.
std::pair<std::vector<std::int64_t>, std::int64_t> read(EvaluationFolder& folder) {
  std::vector<std::int64_t> lines;
  const std::int64_t torn = folder.read(labels, [&](EvalRecord&& r) { lines.push_back(r.line); });
  return {lines, torn};
}

using Lines = std::vector<std::int64_t>;

TEST(EvalRecords, ComeBackAsTheyWere) {
  const EvalRecord made = record(3, "none");
  const EvalRecord again = EvalRecord::parse(made.to_json_line());
  EXPECT_EQ(again.to_json_line(), made.to_json_line());
  EXPECT_EQ(again.scores, made.scores);
  EXPECT_EQ(again.kept_rows, made.kept_rows);
  EXPECT_FALSE(again.perplexity);
  EXPECT_EQ(again.answers[0], "a \"quoted\"\nanswer \xef\xbf\xbd");
  expect_error([] { EvalRecord::parse("{\"task_file\": 3}"); },
               {"task_file: expected a string, found 3"});
}

TEST(EvalRecords, ATornPromptIsCutOffWhereverItTore) {
  const TemporaryFolder folder;
  std::string whole, torn;
  for (const auto& line : prompt(1)) whole += line + "\n";
  for (const auto& line : prompt(2)) torn += line + "\n";
  for (const std::size_t cut : {std::size_t{1}, torn.size() / 2 - 1, torn.size() / 2,
                                torn.size() / 2 + 10, torn.size() - 1}) {
    folder.write("records.jsonl", whole + torn.substr(0, cut));
    EvaluationFolder open(folder.path());
    EXPECT_EQ(read(open), std::make_pair(Lines({1, 1}), static_cast<std::int64_t>(cut)));
    EXPECT_EQ(content(open.records_file()), whole);
    open.append(prompt(2));
    EXPECT_EQ(content(open.records_file()), whole + torn);
  }
  // A power failure may leave zeros.
  folder.write("records.jsonl", whole + std::string(100, '\0'));
  EvaluationFolder open(folder.path());
  EXPECT_EQ(read(open), std::make_pair(Lines({1, 1}), std::int64_t{100}));
}

TEST(EvalRecords, DamageInTheMiddleIsRefused) {
  const TemporaryFolder folder;
  std::string text;
  for (const auto& line : prompt(1)) text += line + "\n";
  folder.write("records.jsonl", "damaged\n" + text);
  EvaluationFolder open(folder.path());
  expect_error([&] { read(open); }, {"records.jsonl: line 1: ", "records follow"});
  folder.write("records.jsonl", text + prompt(2)[1] + "\n");
  expect_error([&] { read(open); },
               {"records.jsonl: line 3: ", "expected the record of", "and none"});
  folder.write("records.jsonl", text + text);
  expect_error([&] { read(open); }, {"records.jsonl: line 4: ", "tasks.jsonl:1 has two records"});
}

TEST(EvalRecords, AnotherEvaluationIsRefusedByName) {
  const TemporaryFolder folder;
  const ordered_json here = {
      {"version", "1"},
      {"model", {{"folder", "a"}, {"hash", "12"}}},
      {"options", {{"seed", 1}, {"dtype", "f32"}}},
      {"tasks", {{{"file", "x.jsonl"}, {"rows", 3}}}},
      {"settings", {{{"label", "none"}}, {{"label", "snapkv@evict-ratio=0.5"}}}}};
  {
    EvaluationFolder open(folder.path() / "new" / "folder");
    open.begin(here);
    open.begin(here);
    ordered_json moved = here;
    moved["version"] = "2";
    moved["model"]["folder"] = "b";
    open.begin(moved);
    ordered_json other = here;
    other["model"]["hash"] = "13";
    other["options"]["dtype"] = "bf16";
    other["options"]["top_k"] = 4;
    other["tasks"][0]["rows"] = 4;
    other["settings"][1]["label"] = "tova@evict-ratio=0.5";
    expect_error(
        [&] { open.begin(other); },
        {"has another evaluation", "model.hash: recorded \"12\", given \"13\"",
         "options.dtype: recorded \"f32\", given \"bf16\"",
         "options.top_k: recorded absent, given 4", "tasks.x.jsonl.rows: recorded 3, given 4",
         "settings: snapkv@evict-ratio=0.5 is only in the recorded evaluation"});
    other = here;
    other["settings"][0]["label"] = 3;  // as no kvzap eval writes it
    expect_error([&] { open.begin(other); },
                 {"settings: none is only in the recorded", "1 is only in the given"});
    ordered_json turned = here;
    std::swap(turned["settings"][0], turned["settings"][1]);
    expect_error([&] { open.begin(turned); }, {"settings are in another order"});
    expect_error([&] { EvaluationFolder second(open.folder()); }, {"another kvzap eval"});
  }
  const EvaluationFolder again(folder.path() / "new" / "folder");  // the lock is gone
  folder.write("records.jsonl", "{}\n");
  EvaluationFolder without(folder.path());
  expect_error([&] { without.begin(here); },
               {"evaluation.json: expected the evaluation of", "found no such file"});
  for (const char* name : {"summary.json", "summary.csv"}) {
    const TemporaryFolder own;
    own.write(name, "somebody's");
    EvaluationFolder open(own.path());
    expect_error([&] { open.begin(here); }, {name, "evaluation.json: expected the evaluation of"});
  }
}

TEST(EvalRecords, AFullDiskLeavesWhatWasThere) {
  const TemporaryFolder folder;
  EvaluationFolder open(folder.path());
  EXPECT_EQ(read(open).second, 0);
  open.append(prompt(1));
  const std::string whole = content(open.records_file());
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = whole.size() + 10;  // some of it still fits
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  EXPECT_THROW(open.append(prompt(2)), kvzap::Error);
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(content(open.records_file()), whole);
  open.append(prompt(2));
  EXPECT_EQ(read(open), std::make_pair(Lines({1, 1, 2, 2}), std::int64_t{0}));
}

TEST(EvalRecords, AFolderThatIsNoneIsNamed) {
  const TemporaryFolder folder;
  folder.write("file", "");
  expect_error([&] { EvaluationFolder open(folder.path() / "file"); }, {"-o ", "file"});
  std::filesystem::create_symlink("/dev/full", folder.path() / "records.jsonl");
  expect_error([&] { EvaluationFolder open(folder.path()); }, {"is no regular file"});
}

}  // namespace
