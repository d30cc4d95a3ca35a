#include "commands/support/recommendation.hpp"

#include <fmt/format.h>

#include "commands/lab/leaderboard_data.hpp"
#include "commands/support/model_loading.hpp"
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

}  // namespace

ThresholdTable::Recommendation recommend_threshold(const std::string& folder,
                                                   const std::string& surrogate) {
  const LeaderboardEvaluation evaluation = read_evaluation(folder);
  if (!evaluation.is_complete) {
    throw Error(fmt::format("{}: the evaluation is not complete; kvzap eval continues it", folder));
  }
  check_surrogate(evaluation, surrogate);
  // Rows of other types than --kv-type have another full cache.
  const auto is_general = [](const LeaderboardRow& row) {
    return row.setting.find("@kv-type=") == std::string::npos;
  };
  const TaskFigures* full = nullptr;
  for (const LeaderboardRow& row : evaluation.rows) {
    if (row.policy == "none" && is_general(row)) full = &figures_of(evaluation, row);
  }
  if (full == nullptr || !full->accuracy) {
    throw Error(fmt::format("{}: expected the accuracy of the policy none, found none", folder));
  }
  ThresholdTable::Recommendation best;
  std::int64_t thresholds = 0;
  for (const LeaderboardRow& row : evaluation.rows) {
    if (row.policy != policy::with_surrogate().name || !row.threshold || !is_general(row)) continue;
    const TaskFigures& figures = figures_of(evaluation, row);
    if (!figures.accuracy || !figures.high) continue;
    ++thresholds;
    const bool covers = *figures.high >= *full->accuracy;
    if (!covers || (best.prompts > 0 && figures.evict_ratio <= best.evict_ratio)) continue;
    best = {*row.threshold, figures.evict_ratio, *figures.accuracy, figures.low.value_or(0),
            *figures.high,  *full->accuracy,     figures.prompts,   folder};
  }
  if (thresholds == 0) {
    throw Error(
        fmt::format("{}: expected kvzap at thresholds, such as --policies \"none;kvzap\" "
                    "--thresholds -6,-5,-4, found none",
                    folder));
  }
  if (best.prompts == 0) {
    throw Error(
        fmt::format("{}: each of the {} thresholds lowers the accuracy below the full "
                    "cache's {:.3f}; evaluate lower thresholds",
                    folder, thresholds, *full->accuracy));
  }
  return best;
}

}  // namespace kvzap::driver
