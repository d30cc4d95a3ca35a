// Means, intervals and tables of an evaluation's records.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <kvzap/lab/metrics.hpp>
#include <sstream>

#include "eval/summary.hpp"

namespace {

using kvzap::eval::EvalRecord;
using kvzap::eval::EvalSetting;
using kvzap::eval::EvaluationSummary;
using kvzap::eval::setting_words;
using kvzap::eval::SummaryOptions;
using nlohmann::ordered_json;

std::vector<EvalSetting> settings() {
  EvalSetting none, chunk;
  none.label = "none";
  chunk.pruning.policy = "snapkv+chunk:length=20";
  chunk.label =
      "snapkv:window=16,kernel=3,pooling=max+chunk:length=20+rerotate@evict-ratio=0.5"
      "@prune-after=question";
  chunk.pruning.evict_ratio(0.5);
  return {none, chunk};
}

EvalRecord record(const std::string& task, std::int64_t line, std::size_t setting,
                  const std::vector<double>& scores, double evict_ratio) {
  EvalRecord made;
  made.task_file = "t.jsonl";
  made.task = task;
  made.line = line;
  made.setting = settings()[setting].label;
  made.scores = scores;
  double sum = 0;
  for (const double score : scores) sum += score;
  made.score = sum / static_cast<double>(scores.size());
  made.evict_ratio = evict_ratio;
  made.cache_tokens = 10;
  made.kept_rows = {{10, static_cast<std::int64_t>(std::lround(10 - 20 * evict_ratio))}};
  made.kv_bytes = 1 << 20;
  made.full_kv_bytes = 3 << 20;
  made.kv_bytes_at_end = made.kv_bytes + 100;
  made.full_kv_bytes_at_end = 4 << 20;
  made.prefill_seconds = 0.5;
  made.decode_seconds = 0.25;
  return made;
}

std::vector<EvalRecord> records() {
  return {record("b", 1, 0, {1, 1}, 0),   record("b", 1, 1, {0, 1}, 0.5),
          record("b", 2, 0, {1, 1}, 0),   record("b", 2, 1, {0, 0}, 0.3),
          record("a", 3, 0, {0.5, 1}, 0), record("a", 3, 1, {0, 0.5}, 0.4)};
}

TEST(EvalSummary, HasARowForEveryTaskAndSettingAndForAllPrompts) {
  SummaryOptions options;
  options.pass_k = 1;
  options.prompts = 4;
  EvaluationSummary summary(settings(), options);
  for (const EvalRecord& r : records()) summary.add(r);
  const ordered_json json = summary.rows();
  EXPECT_EQ(json["prompts"], 3);
  EXPECT_EQ(json["complete"], false);
  ASSERT_EQ(json["rows"].size(), 6u);
  EXPECT_EQ(json["rows"][0]["task"], "b");
  EXPECT_EQ(json["rows"][2]["task"], "a");
  const ordered_json& row = json["rows"][5];
  EXPECT_EQ(row["task"], "all");
  EXPECT_EQ(row["prompts"], 3);
  EXPECT_DOUBLE_EQ(row["accuracy"].get<double>(), 0.25);
  EXPECT_LE(row["accuracy_low"].get<double>(), 0.25);
  EXPECT_GE(row["accuracy_high"].get<double>(), 0.25);
  EXPECT_EQ(json["rows"][0]["accuracy_low"], kvzap::wilson_interval(2, 2).low);
  EXPECT_EQ(json["rows"][0]["accuracy_high"], 1);
  EXPECT_EQ(json["rows"][0]["pass_at_k_low"], kvzap::wilson_interval(2, 2).low);
  EXPECT_DOUBLE_EQ(row["pass_at_k"].get<double>(), 0.5 / 3);  // of two tries one was right
  EXPECT_EQ(row["evict_ratio_asked"], 0.5);
  EXPECT_DOUBLE_EQ(row["evict_ratio_mean"].get<double>(), 0.4);
  EXPECT_EQ(row["evict_ratio_min"], 0.3);
  EXPECT_EQ(row["evict_ratio_max"], 0.5);
  EXPECT_EQ(row["full_kv_bytes"], 3 << 20);
  EXPECT_EQ(row["full_kv_bytes_at_end"], 4 << 20);
  EXPECT_EQ(row["kv_bytes_at_end"].get<double>(), row["kv_bytes"].get<double>() + 100);
  EXPECT_DOUBLE_EQ(row["prefill_seconds"].get<double>(), 1.5);
  EXPECT_EQ(row["keep_ratio"], ordered_json::parse("[[1.0, 0.2]]"));
  EXPECT_FALSE(json["rows"][4].contains("threshold"));

  // In whatever order they were found.
  EvaluationSummary turned(settings(), options);
  turned.add_task("b");
  const auto all = records();
  for (auto r = all.rbegin(); r != all.rend(); ++r) turned.add(*r);
  EXPECT_EQ(turned.rows(), json);
}

TEST(EvalSummary, PerplexityIsOfAllTokensTogether) {
  EvaluationSummary summary(settings(), {});
  for (std::int64_t line = 1; line <= 2; ++line) {
    EvalRecord r = record("text", line, 0, {0}, 0);
    r.score.reset();
    r.scores.clear();
    r.nll = line == 1 ? 1.0 : 11.0;
    r.generated_tokens = line == 1 ? 1 : 3;
    summary.add(r);
  }
  const ordered_json row = summary.rows()["rows"][0];
  EXPECT_DOUBLE_EQ(row["perplexity"].get<double>(), std::exp(3.0));
  EXPECT_FALSE(row.contains("accuracy"));
  EXPECT_NE(summary.table().find("perplexity 20.086"), std::string::npos);
}

TEST(EvalSummary, TablesAreLegible) {
  EvaluationSummary summary(settings(), {});
  for (const EvalRecord& r : records()) summary.add(r);
  std::istringstream table(summary.table()), csv(summary.csv());
  std::size_t lines = 0;
  for (std::string line; std::getline(table, line); ++lines) EXPECT_LE(line.size(), 120u) << line;
  EXPECT_EQ(lines, 3u * 5 + 2);  // the long label has a line of its own
  EXPECT_NE(summary.table().find("\n" + setting_words(settings()[1].label, 0.4) + "\n"),
            std::string::npos);
  std::string line;
  std::getline(csv, line);
  const auto commas = std::count(line.begin(), line.end(), ',');
  std::getline(csv, line);
  EXPECT_EQ(std::count(line.begin(), line.end(), ','), commas);
  EXPECT_EQ(line.find("b,none,none,0,,,,context,prefill,dense,2,1"), 0u) << line;
  std::getline(csv, line);
  EXPECT_EQ(line.find("b,\"snapkv:window=16,kernel=3,"), 0u) << line;
}

}  // namespace
