// Reads the evaluations of `kvzap leaderboard` from their folders, joins and orders them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace kvzap::driver {

/// Name of the summary's task that contains every prompt.
inline constexpr const char* all_prompts = "all";

/// Results of one task under one setting.
struct TaskFigures {
  std::int64_t prompts = 0;
  std::optional<double> accuracy, low, high;  // in [0, 1]
  std::optional<double> perplexity;
  double evict_ratio = 0, least = 0, most = 0;
  double kv_bytes = 0, full_kv_bytes = 0;
  double seconds = 0;  // prefill and decode of all prompts

  /// The evict ratio, rounded to the eighth by which rows are ordered.
  double ratio_band() const;
};

struct LeaderboardRow {
  std::size_t evaluation;
  std::string setting, policy;
  std::optional<double> threshold;
  std::map<std::string, TaskFigures> tasks;
};

/// Options of an evaluation with their values as JSON text; absent without evaluation.json.
using OptionTexts = std::optional<std::map<std::string, std::string>>;

struct LeaderboardEvaluation {
  std::string folder, name;
  std::string model, config_hash;
  std::vector<std::string> tasks;  // without "all"
  std::vector<LeaderboardRow> rows;
  std::map<std::string, std::int64_t> prompts;  // of each task
  std::set<std::string> hashes;                 // of the task files
  bool is_complete = true;
  OptionTexts options;  // of evaluation.json
};

struct Leaderboard {
  std::vector<LeaderboardEvaluation> evaluations;
  std::vector<std::string> tasks;    // columns
  std::string task;                  // task whose figures come first and determine the order
  std::vector<LeaderboardRow> rows;  // in order
  std::vector<std::string> notes;

  bool has_evaluations() const { return evaluations.size() > 1; }
};

/// Reads the summary in the folder, and evaluation.json if it is there. Throws Error for a file
/// that is no such summary.
LeaderboardEvaluation read_evaluation(const std::string& folder);

/// Reads the summary in each folder of `kvzap eval`, and orders rows by the figures of `task`.
/// Throws Error for a file that is no such summary, a folder that occurs twice, and an unknown
/// task.
Leaderboard join_evaluations(const std::vector<std::string>& folders, const std::string& task);

}  // namespace kvzap::driver
