#include "commands/lab/leaderboard_data.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "files/json_field.hpp"
#include "files/json_file.hpp"
#include "files/nearest.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;
using files::JsonField;
using nlohmann::json;

/// Keep ratios of every row make the summaries of large models long.
constexpr std::uintmax_t max_summary_bytes = 1u << 30;
/// Evict ratios that round to the same multiple of 1 / bands are comparable. The usual ratios
/// (0.25, 0.5, 0.75, 0.9) lie well within their bands.
constexpr int bands = 8;

// --- reading

/// A number from 0 to 1, with room for rounding errors.
double share_of(const JsonField& object, const char* name) {
  constexpr double rounding = 1e-9;
  const JsonField field = object.member(name);
  const double value = field.value().is_number() ? field.number() : -1;
  if (!(value >= -rounding && value <= 1 + rounding)) field.fail("a number from 0 to 1");
  return value;
}

double amount_of(const JsonField& object, const char* name) {
  const JsonField field = object.member(name);
  const double value = field.value().is_number() ? field.number() : -1;
  if (!(value >= 0)) field.fail("a number that is not negative");
  return value;
}

template <class Read>
std::optional<double> if_there(const JsonField& object, const char* name, const Read& read) {
  if (object.member(name).is_null()) return std::nullopt;
  return read(object, name);
}

TaskFigures read_figures(const JsonField& row) {
  TaskFigures f;
  f.prompts = static_cast<std::int64_t>(row.member("prompts").number(0, 1e15));
  f.accuracy = if_there(row, "accuracy", share_of);
  f.low = if_there(row, "accuracy_low", share_of);
  f.high = if_there(row, "accuracy_high", share_of);
  f.perplexity = if_there(row, "perplexity", amount_of);
  f.evict_ratio = share_of(row, "evict_ratio_mean");
  f.least = share_of(row, "evict_ratio_min");
  f.most = share_of(row, "evict_ratio_max");
  f.kv_bytes = amount_of(row, "kv_bytes");
  f.full_kv_bytes = amount_of(row, "full_kv_bytes");
  f.seconds = amount_of(row, "prefill_seconds") + amount_of(row, "decode_seconds");
  return f;
}

void check_format(const JsonField& file, const std::string& format) {
  const JsonField found = file.member("format");
  if (found.value() != format) found.fail("\"" + format + "\"");
  const JsonField version = file.member("format_version");
  if (version.value() != 1) version.fail("1");
}

/// Reads the options of the evaluation; absent if its folder has no evaluation.json.
OptionTexts read_options(const fs::path& folder) {
  const fs::path file = folder / "evaluation.json";
  std::error_code ignored;
  if (!fs::exists(file, ignored)) return {};
  const json content = files::read_json_object(file);
  const JsonField evaluation(content, file.string());
  check_format(evaluation, "kvzap.evaluation");
  const JsonField options = evaluation.member("options").object();
  std::map<std::string, std::string> texts;
  for (const auto& item : options.value().items()) {
    texts[item.key()] = item.value().dump(-1, ' ', false, json::error_handler_t::replace);
  }
  return texts;
}

void read_row(const JsonField& row, LeaderboardEvaluation& evaluation,
              std::map<std::string, std::size_t>& row_of) {
  const std::string task = row.member("task").string();
  const std::string setting = row.member("setting").string();
  const std::string policy = row.member("policy").string();
  const TaskFigures figures = read_figures(row);
  const auto [at, is_new] = row_of.emplace(setting, evaluation.rows.size());
  if (is_new) {
    const JsonField threshold = row.member("threshold");
    // An infinite threshold is a text.
    const bool is_number = threshold.value().is_number();
    evaluation.rows.push_back(
        {0, setting, policy, is_number ? std::optional(threshold.number()) : std::nullopt, {}});
  }
  // Rows of all prompts come last in a summary. They replace the rows of a task that is called
  // "all".
  evaluation.rows[at->second].tasks.insert_or_assign(task, figures);
  evaluation.prompts[task] = figures.prompts;
  auto& tasks = evaluation.tasks;
  if (task != all_prompts && std::find(tasks.begin(), tasks.end(), task) == tasks.end()) {
    tasks.push_back(task);
  }
}

}  // namespace

LeaderboardEvaluation read_evaluation(const std::string& folder) {
  const fs::path file = fs::path(folder) / "summary.json";
  const json content = files::read_json_object(file, max_summary_bytes);
  const JsonField summary(content, file.string());
  check_format(summary, "kvzap.evaluation_summary");

  LeaderboardEvaluation evaluation;
  evaluation.folder = folder;
  fs::path path = fs::path(folder).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  if (path == "." || path == "..") path = fs::absolute(folder).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  evaluation.name = path.filename().string();
  const JsonField model = summary.member("model");
  evaluation.model = model.member("name").string();
  const JsonField hash = model.member("config_hash");
  if (!hash.is_null()) evaluation.config_hash = hash.string();
  evaluation.is_complete = summary.member("complete").boolean(true);
  const JsonField files = summary.member("tasks");
  for (std::size_t i = 0; !files.is_null() && i < files.array_size(); ++i) {
    evaluation.hashes.insert(files.element(i).member("hash").string());
  }

  const JsonField rows = summary.member("rows");
  if (!rows.value().is_array() || rows.value().empty()) rows.fail("a list that is not empty");
  std::map<std::string, std::size_t> row_of;
  for (std::size_t i = 0; i < rows.array_size(); ++i) read_row(rows.element(i), evaluation, row_of);
  evaluation.options = read_options(folder);
  return evaluation;
}

namespace {

// --- joining

/// Joins names: "a, b and c".
std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == names.size() ? " and " : ", ") + names[i];
  }
  return text;
}

void name_apart(std::vector<LeaderboardEvaluation>& evaluations) {
  std::map<std::string, int> count;
  for (const auto& e : evaluations) ++count[e.name];
  std::error_code ignored;
  for (auto& e : evaluations) {
    if (count[e.name] > 1) e.name = e.folder;
  }
  for (std::size_t i = 0; i < evaluations.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (fs::equivalent(evaluations[i].folder, evaluations[j].folder, ignored)) {
        throw Error(fmt::format("{} and {} are the same folder", evaluations[j].folder,
                                evaluations[i].folder));
      }
    }
  }
}

/// Lists options that differ between evaluations: "window: 32 (A), 128 (B and C)". Paths and the
/// choice of prompts do not count.
std::string differing_options(const std::vector<LeaderboardEvaluation>& evaluations) {
  // The choice of prompts and the paths of files do not affect the quality of an answer.
  const std::set<std::string> ignored = {"per_task", "max_prompts", "surrogate",
                                         "prompt_templates"};
  std::set<std::string> names;
  for (const auto& e : evaluations) {
    if (!e.options) continue;
    for (const auto& [name, value] : *e.options) {
      if (ignored.count(name) == 0) names.insert(name);
    }
  }
  std::vector<std::string> differences;
  for (const std::string& name : names) {
    std::map<std::string, std::vector<std::string>> by_value;
    for (const auto& e : evaluations) {
      if (!e.options) continue;
      const auto found = e.options->find(name);
      by_value[found == e.options->end() ? "-" : found->second].push_back(e.name);
    }
    if (by_value.size() < 2) continue;
    std::vector<std::string> parts;
    parts.reserve(by_value.size());
    for (const auto& [value, of] : by_value) {
      parts.push_back(fmt::format("{} ({})", value, listed(of)));
    }
    differences.push_back(fmt::format("{}: {}", name, fmt::join(parts, ", ")));
  }
  return fmt::format("{}", fmt::join(differences, "; "));
}

/// Warns about evaluations that are incomplete or not comparable.
std::vector<std::string> notes_of(const std::vector<LeaderboardEvaluation>& evaluations) {
  std::vector<std::string> notes;
  for (const auto& e : evaluations) {
    if (!e.is_complete) notes.push_back(fmt::format("{} is incomplete.", e.name));
  }
  std::map<std::string, std::set<std::string>> hashes;  // of the models with one name
  bool same_prompts = true;
  std::vector<std::string> without_options;
  const auto& first = evaluations.front();
  for (const auto& e : evaluations) {
    hashes[e.model].insert(e.config_hash);
    same_prompts = same_prompts && e.hashes == first.hashes && e.prompts == first.prompts;
    if (!e.options) without_options.push_back(e.name);
  }
  if (hashes.size() > 1) {
    notes.emplace_back("Models differ: compare only rows of one model.");
  }
  for (const auto& [model, of] : hashes) {
    if (of.size() > 1) {
      notes.push_back(fmt::format(
          "Evaluations of {} used different models: their config_hash differs.", model));
    }
  }
  if (!same_prompts) {
    std::vector<std::string> prompts;
    for (const auto& e : evaluations) {
      const auto all = e.prompts.find(all_prompts);
      prompts.push_back(fmt::format("{}: {} of {}", e.name,
                                    all == e.prompts.end() ? 0 : all->second, listed(e.tasks)));
    }
    notes.push_back(fmt::format(
        "Prompts differ, even in tasks with the same name: compare only rows of one evaluation "
        "({}).",
        fmt::join(prompts, "; ")));
  }
  const std::string differences = differing_options(evaluations);
  if (!differences.empty()) notes.push_back(fmt::format("Options differ: {}.", differences));
  if (!without_options.empty() && evaluations.size() > 1) {
    notes.push_back(
        fmt::format("Options of {} are not known: no evaluation.json.", listed(without_options)));
  }
  return notes;
}

/// Orders by ratio band, then better results first. Rows without accuracy come last.
bool is_before(const TaskFigures& a, const TaskFigures& b) {
  if (a.ratio_band() != b.ratio_band()) return a.ratio_band() < b.ratio_band();
  if (a.accuracy != b.accuracy) return a.accuracy > b.accuracy;
  if (a.perplexity != b.perplexity) {
    return a.perplexity && (!b.perplexity || *a.perplexity < *b.perplexity);
  }
  return a.evict_ratio > b.evict_ratio;
}

}  // namespace

double TaskFigures::ratio_band() const {
  return static_cast<double>(std::lround(evict_ratio * bands)) / bands;
}

Leaderboard join_evaluations(const std::vector<std::string>& folders, const std::string& task) {
  Leaderboard board;
  for (const auto& folder : folders) {
    board.evaluations.push_back(read_evaluation(folder));
  }
  name_apart(board.evaluations);
  board.task = task;
  std::vector<std::string> known = {all_prompts};
  for (const auto& e : board.evaluations) {
    for (const auto& name : e.tasks) {
      if (std::find(known.begin(), known.end(), name) == known.end()) known.push_back(name);
    }
  }
  if (std::find(known.begin(), known.end(), board.task) == known.end()) {
    const std::string nearest = files::nearest_name(board.task, known);
    throw Error(fmt::format("--task {}: no evaluation has this task; {}", board.task,
                            nearest.empty() ? fmt::format("there are {}", listed(known))
                                            : fmt::format("did you mean {}?", nearest)));
  }
  // With a single task, its column would repeat the column of all prompts.
  if (board.task == all_prompts && known.size() > 2) {
    board.tasks.assign(known.begin() + 1, known.end());
  }
  for (std::size_t i = 0; i < board.evaluations.size(); ++i) {
    for (LeaderboardRow row : board.evaluations[i].rows) {
      row.evaluation = i;
      if (row.tasks.count(board.task) > 0) {
        board.rows.push_back(std::move(row));
      } else if (board.task == all_prompts) {
        throw Error(fmt::format(
            "{}: rows: expected a row of task \"all\" for setting \"{}\", found none",
            (fs::path(board.evaluations[i].folder) / "summary.json").string(), row.setting));
      }
    }
  }
  std::stable_sort(board.rows.begin(), board.rows.end(),
                   [&](const LeaderboardRow& a, const LeaderboardRow& b) {
                     return is_before(a.tasks.at(board.task), b.tasks.at(board.task));
                   });
  board.notes = notes_of(board.evaluations);
  return board;
}

}  // namespace kvzap::driver
