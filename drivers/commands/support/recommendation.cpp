#include "commands/support/recommendation.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <optional>

#include "commands/lab/leaderboard_data.hpp"
#include "commands/support/model_loading.hpp"
#include "files/decimal.hpp"
#include "files/quote.hpp"
#include "policy/pruning_text.hpp"

namespace kvzap::driver {
namespace {

/// Returns the JSON text of an option of the evaluation, or "".
std::string option_of(const LeaderboardEvaluation& evaluation, const char* name) {
  if (!evaluation.options) return "";
  const auto found = evaluation.options->find(name);
  return found == evaluation.options->end() ? "" : found->second;
}

void check_surrogate(const LeaderboardEvaluation& evaluation, const std::string& surrogate) {
  const std::string hash = fmt::format("\"{}\"", hash_of_policy_file(surrogate));
  if (option_of(evaluation, "surrogate_hash") == hash) return;
  const std::string found = option_of(evaluation, "surrogate");
  throw Error(fmt::format("{}: surrogate: expected {}, found {}", evaluation.folder,
                          files::in_quotes(surrogate),
                          found.empty() ? "none" : files::shown(found) + " or other contents"));
}

const TaskFigures& figures_of(const LeaderboardEvaluation& evaluation, const LeaderboardRow& row) {
  const auto found = row.tasks.find(all_prompts);
  if (found != row.tasks.end()) return found->second;
  throw Error(fmt::format("{}: expected a row of task \"{}\" for setting {}, found none",
                          evaluation.folder, all_prompts, files::in_quotes(row.setting)));
}

int window_of(const LeaderboardEvaluation& evaluation) {
  const std::string text = option_of(evaluation, "window");
  int window = 0;
  if (files::read_whole(text, window) == files::DecimalFault::none && window >= 1) return window;
  throw Error(
      fmt::format("{}/evaluation.json: options.window: expected a whole number from 1, "
                  "found {}",
                  evaluation.folder, text.empty() ? "none" : files::shown(text)));
}

/// Evict ratios of different prompts do not compare.
void check_same_prompts(const LeaderboardEvaluation& evaluation,
                        const LeaderboardEvaluation& first) {
  if (evaluation.hashes == first.hashes && evaluation.prompts == first.prompts) return;
  throw Error(fmt::format("{}: has other prompts than {}; expected the same", evaluation.folder,
                          first.folder));
}

/// Replaces `best` by each threshold of the evaluation that evicts more at the full cache's
/// accuracy. Returns the number of its thresholds.
std::int64_t choose_from(const LeaderboardEvaluation& evaluation,
                         ThresholdTable::Recommendation& best) {
  // Rows of other types than --kv-type have another full cache.
  const auto is_general = [](const LeaderboardRow& row) {
    return row.setting.find("@kv-type=") == std::string::npos;
  };
  const TaskFigures* full = nullptr;
  for (const LeaderboardRow& row : evaluation.rows) {
    if (row.policy == "none" && is_general(row)) full = &figures_of(evaluation, row);
  }
  if (full == nullptr || !full->accuracy) {
    throw Error(
        fmt::format("{}: expected the accuracy of the policy none, found none", evaluation.folder));
  }
  std::int64_t thresholds = 0;
  for (const LeaderboardRow& row : evaluation.rows) {
    if (row.policy != policy::with_surrogate().name || !row.threshold || !is_general(row)) continue;
    const TaskFigures& figures = figures_of(evaluation, row);
    if (!figures.accuracy || !figures.high) continue;
    ++thresholds;
    const bool covers = *figures.high >= *full->accuracy;
    if (!covers || (best.prompts > 0 && figures.evict_ratio <= best.evict_ratio)) continue;
    best.threshold = *row.threshold;
    best.window = window_of(evaluation);
    best.evict_ratio = figures.evict_ratio;
    best.accuracy = *figures.accuracy;
    best.accuracy_low = figures.low.value_or(0);
    best.accuracy_high = *figures.high;
    best.full_accuracy = *full->accuracy;
    best.prompts = figures.prompts;
    best.evaluation = evaluation.folder;
  }
  if (thresholds == 0) {
    throw Error(
        fmt::format("{}: expected kvzap at thresholds, such as --policies \"none;kvzap\" "
                    "--thresholds -6,-5,-4, found none",
                    evaluation.folder));
  }
  return thresholds;
}

}  // namespace

ThresholdTable::Recommendation recommend_threshold(const std::vector<std::string>& evaluations,
                                                   const std::string& surrogate) {
  std::optional<LeaderboardEvaluation> first;
  ThresholdTable::Recommendation best;
  std::int64_t thresholds = 0;
  for (const std::string& folder : evaluations) {
    const LeaderboardEvaluation evaluation = read_evaluation(folder);
    if (!evaluation.is_complete) {
      throw Error(
          fmt::format("{}: the evaluation is not complete; kvzap eval continues it", folder));
    }
    check_surrogate(evaluation, surrogate);
    if (!first) first = evaluation;
    check_same_prompts(evaluation, *first);
    thresholds += choose_from(evaluation, best);
  }
  if (best.prompts == 0) {
    throw Error(
        fmt::format("{}: each of the {} thresholds lowers the accuracy below the full cache's; "
                    "evaluate lower thresholds",
                    fmt::join(evaluations, ", "), thresholds));
  }
  return best;
}

}  // namespace kvzap::driver
