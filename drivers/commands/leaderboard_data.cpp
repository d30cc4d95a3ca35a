#include "commands/leaderboard_data.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/json_file.hpp"
#include "base/nearest.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// Keep ratios of every row make the summaries of large models long.
constexpr std::uintmax_t max_summary_bytes = 1u << 30;
/// Evict ratios that round to the same multiple of 1 / bands are comparable. The usual ratios
/// (0.25, 0.5, 0.75, 0.9) lie well within their bands.
constexpr int bands = 8;

// --- reading

/// Reads fields of a file's objects. Messages name file, field, expected and found.
class FieldReader {
 public:
  explicit FieldReader(std::string file) : m_file(std::move(file)) {}

  void expect(bool holds, const std::string& field, const std::string& expected,
              const json& found) const {
    if (holds) return;
    throw Error(fmt::format("{}: {}: expected {}, found {}", m_file, field, expected,
                            found.is_null() ? "nothing" : detail::described(found)));
  }
  std::string text(const json& object, const char* name, const std::string& where) const {
    const json& value = at(object, name);
    expect(value.is_string(), where + name, "text", value);
    return value.get<std::string>();
  }
  double number(const json& object, const char* name, const std::string& where, double most) const {
    const json& value = at(object, name);
    const bool good = value.is_number() && value.get<double>() >= -rounding &&
                      value.get<double>() <= most * (1 + rounding);
    expect(good, where + name, most == 1 ? "a number from 0 to 1" : "a number that is not negative",
           value);
    return value.get<double>();
  }
  std::optional<double> maybe_number(const json& object, const char* name, const std::string& where,
                                     double most) const {
    if (at(object, name).is_null()) return std::nullopt;
    return number(object, name, where, most);
  }
  static const json& at(const json& object, const char* name) {
    static const json nothing;
    const auto found = object.find(name);
    return found == object.end() ? nothing : *found;
  }

 private:
  static constexpr double rounding = 1e-9;
  std::string m_file;
};

constexpr double any_size = 1e300;

TaskFigures read_figures(const FieldReader& reader, const json& row, const std::string& where) {
  TaskFigures f;
  f.prompts = static_cast<std::int64_t>(reader.number(row, "prompts", where, 1e15));
  f.accuracy = reader.maybe_number(row, "accuracy", where, 1);
  f.low = reader.maybe_number(row, "accuracy_low", where, 1);
  f.high = reader.maybe_number(row, "accuracy_high", where, 1);
  f.perplexity = reader.maybe_number(row, "perplexity", where, any_size);
  f.evict_ratio = reader.number(row, "evict_ratio_mean", where, 1);
  f.least = reader.number(row, "evict_ratio_min", where, 1);
  f.most = reader.number(row, "evict_ratio_max", where, 1);
  f.kv_bytes = reader.number(row, "kv_bytes", where, any_size);
  f.full_kv_bytes = reader.number(row, "full_kv_bytes", where, any_size);
  f.seconds = reader.number(row, "prefill_seconds", where, any_size) +
              reader.number(row, "decode_seconds", where, any_size);
  return f;
}

void check_format(const FieldReader& reader, const json& object, const std::string& format) {
  const json& found = FieldReader::at(object, "format");
  reader.expect(found == format, "format", "\"" + format + "\"", found);
  const json& format_version = FieldReader::at(object, "format_version");
  reader.expect(format_version == 1, "format_version", "1", format_version);
}

/// Reads the options of the evaluation; absent if its folder has no evaluation.json.
OptionTexts read_options(const fs::path& folder) {
  const fs::path file = folder / "evaluation.json";
  std::error_code ignored;
  if (!fs::exists(file, ignored)) return {};
  const json evaluation = detail::read_json_object(file);
  const FieldReader reader(file.string());
  check_format(reader, evaluation, "kvzap.evaluation");
  const json& options = FieldReader::at(evaluation, "options");
  reader.expect(options.is_object(), "options", "an object", options);
  std::map<std::string, std::string> texts;
  for (const auto& item : options.items()) {
    texts[item.key()] = item.value().dump(-1, ' ', false, json::error_handler_t::replace);
  }
  return texts;
}

void read_row(const FieldReader& reader, const json& row, const std::string& where,
              LeaderboardEvaluation& evaluation, std::map<std::string, std::size_t>& row_of) {
  const std::string task = reader.text(row, "task", where + ".");
  const std::string setting = reader.text(row, "setting", where + ".");
  const std::string policy = reader.text(row, "policy", where + ".");
  const TaskFigures figures = read_figures(reader, row, where + ".");
  const auto [at, is_new] = row_of.emplace(setting, evaluation.rows.size());
  if (is_new) evaluation.rows.push_back({0, setting, policy, {}});
  // Rows of all prompts come last in a summary. They replace the rows of a task that is called
  // "all".
  evaluation.rows[at->second].tasks.insert_or_assign(task, figures);
  evaluation.prompts[task] = figures.prompts;
  auto& tasks = evaluation.tasks;
  if (task != all_prompts && std::find(tasks.begin(), tasks.end(), task) == tasks.end()) {
    tasks.push_back(task);
  }
}

LeaderboardEvaluation read_evaluation(const std::string& folder) {
  const fs::path file = fs::path(folder) / "summary.json";
  const json summary = detail::read_json_object(file, max_summary_bytes);
  const FieldReader reader(file.string());
  check_format(reader, summary, "kvzap.evaluation_summary");

  LeaderboardEvaluation evaluation;
  evaluation.folder = folder;
  fs::path path = fs::path(folder).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  if (path == "." || path == "..") path = fs::absolute(folder).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  evaluation.name = path.filename().string();
  const json& model = FieldReader::at(summary, "model");
  reader.expect(model.is_object(), "model", "an object", model);
  evaluation.model = reader.text(model, "name", "model.");
  const json& hash = FieldReader::at(model, "config_hash");
  if (!hash.is_null()) evaluation.config_hash = reader.text(model, "config_hash", "model.");
  const json& complete = FieldReader::at(summary, "complete");
  reader.expect(complete.is_null() || complete.is_boolean(), "complete", "true or false", complete);
  evaluation.is_complete = complete.is_null() || complete.get<bool>();
  const json& files = FieldReader::at(summary, "tasks");
  reader.expect(files.is_null() || files.is_array(), "tasks", "a list", files);
  for (std::size_t i = 0; i < files.size(); ++i) {
    const std::string where = fmt::format("tasks[{}]", i);
    reader.expect(files[i].is_object(), where, "an object", files[i]);
    evaluation.hashes.insert(reader.text(files[i], "hash", where + "."));
  }

  const json& rows = FieldReader::at(summary, "rows");
  reader.expect(rows.is_array() && !rows.empty(), "rows", "a list that is not empty", rows);
  std::map<std::string, std::size_t> row_of;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::string where = fmt::format("rows[{}]", i);
    reader.expect(rows[i].is_object(), where, "an object", rows[i]);
    read_row(reader, rows[i], where, evaluation, row_of);
  }
  evaluation.options = read_options(folder);
  return evaluation;
}

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
    const std::string nearest = detail::nearest_name(board.task, known);
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
