#include "commands/leaderboard.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>

#include "base/json_file.hpp"
#include "base/nearest.hpp"
#include "commands/setup.hpp"
#include "options/options.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

constexpr const char* all_prompts = "all";
/// Keep ratios of every row make summaries of large models long.
constexpr std::uintmax_t max_summary_bytes = 1u << 30;
/// Settings whose evict ratios round to the same multiple of 1 / bands are compared with one
/// another: the usual ratios (0.25, 0.5, 0.75, 0.9) lie well within theirs.
constexpr int bands = 8;

/// What an evaluation says of one task under one setting.
struct Figures {
  std::int64_t prompts = 0;
  std::optional<double> accuracy, low, high;  // in [0, 1]
  std::optional<double> perplexity;
  double evict_ratio = 0, least = 0, most = 0;
  double kv_bytes = 0, full_kv_bytes = 0;
  double seconds = 0;  // prefill and decode of all prompts
};

struct SettingRow {
  std::size_t evaluation;
  std::string setting, policy;
  std::map<std::string, Figures> tasks;
};

/// Options of an evaluation with their values as JSON; none if nobody knows them.
using OptionTexts = std::optional<std::map<std::string, std::string>>;

struct JoinedEvaluation {
  std::string folder, name;
  std::string model, config_hash;
  std::vector<std::string> tasks;  // without "all"
  std::vector<SettingRow> rows;
  std::map<std::string, std::int64_t> prompts;  // of each task
  std::set<std::string> hashes;                 // of the task files
  bool is_complete = true;
  OptionTexts options;  // of evaluation.json
};

struct Board {
  std::vector<JoinedEvaluation> evaluations;
  std::vector<std::string> tasks;  // columns
  std::string task;                // whose figures stand first and give the order
  std::vector<SettingRow> rows;    // in order
  std::vector<std::string> notes;

  bool has_evaluations() const { return evaluations.size() > 1; }
};

// --- reading

/// Fields of a file's objects, with messages that name file, field, expected and found.
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

Figures read_figures(const FieldReader& reader, const json& row, const std::string& where) {
  Figures f;
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

/// The options that the evaluation was made with, if its folder still tells them.
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
              JoinedEvaluation& evaluation, std::map<std::string, std::size_t>& row_of) {
  const std::string task = reader.text(row, "task", where + ".");
  const std::string setting = reader.text(row, "setting", where + ".");
  const std::string policy = reader.text(row, "policy", where + ".");
  const Figures figures = read_figures(reader, row, where + ".");
  const auto [at, is_new] = row_of.emplace(setting, evaluation.rows.size());
  if (is_new) evaluation.rows.push_back({0, setting, policy, {}});
  // (What stands for all prompts comes last, also where a task has that name.)
  evaluation.rows[at->second].tasks.insert_or_assign(task, figures);
  evaluation.prompts[task] = figures.prompts;
  auto& tasks = evaluation.tasks;
  if (task != all_prompts && std::find(tasks.begin(), tasks.end(), task) == tasks.end()) {
    tasks.push_back(task);
  }
}

JoinedEvaluation read_evaluation(const std::string& folder) {
  const fs::path file = fs::path(folder) / "summary.json";
  const json summary = detail::read_json_object(file, max_summary_bytes);
  const FieldReader reader(file.string());
  check_format(reader, summary, "kvzap.evaluation_summary");

  JoinedEvaluation evaluation;
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

/// "a, b and c"
std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == names.size() ? " and " : ", ") + names[i];
  }
  return text;
}

void name_apart(std::vector<JoinedEvaluation>& evaluations) {
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

/// "window: 32 (A), 128 (B and C)" for options that are not everywhere the same; paths and other
/// choices of prompts do not count.
std::string differing_options(const std::vector<JoinedEvaluation>& evaluations) {
  // How prompts were chosen, and where things lie, does not change what an answer is worth.
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

/// What a reader must not compare, or must know before.
std::vector<std::string> notes_of(const std::vector<JoinedEvaluation>& evaluations) {
  std::vector<std::string> notes;
  for (const auto& e : evaluations) {
    if (!e.is_complete) notes.push_back(fmt::format("{} is not complete yet.", e.name));
  }
  std::map<std::string, std::set<std::string>> hashes;  // of the models of a name
  bool same_prompts = true;
  std::vector<std::string> without_options;
  const auto& first = evaluations.front();
  for (const auto& e : evaluations) {
    hashes[e.model].insert(e.config_hash);
    same_prompts = same_prompts && e.hashes == first.hashes && e.prompts == first.prompts;
    if (!e.options) without_options.push_back(e.name);
  }
  if (hashes.size() > 1) {
    notes.emplace_back("Models differ: only rows of one model are comparable.");
  }
  for (const auto& [model, of] : hashes) {
    if (of.size() > 1) {
      notes.push_back(fmt::format(
          "Evaluations of {} are of models that are not the same (config_hash).", model));
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
        "Prompts differ, also in tasks of the same name: only rows of one evaluation are "
        "comparable ({}).",
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

int band_of(const Figures& f) { return static_cast<int>(std::lround(f.evict_ratio * bands)); }

/// Whether a is the better one at comparable evict ratios; an accuracy is better than none.
bool is_before(const Figures& a, const Figures& b) {
  if (band_of(a) != band_of(b)) return band_of(a) < band_of(b);
  if (a.accuracy != b.accuracy) return a.accuracy > b.accuracy;
  if (a.perplexity != b.perplexity) {
    return a.perplexity && (!b.perplexity || *a.perplexity < *b.perplexity);
  }
  return a.evict_ratio > b.evict_ratio;
}

Board join(const LeaderboardOptions& options) {
  Board board;
  for (const auto& folder : options.evaluations) {
    board.evaluations.push_back(read_evaluation(folder));
  }
  name_apart(board.evaluations);
  board.task = options.task;
  std::vector<std::string> known = {all_prompts};
  for (const auto& e : board.evaluations) {
    for (const auto& task : e.tasks) {
      if (std::find(known.begin(), known.end(), task) == known.end()) known.push_back(task);
    }
  }
  if (std::find(known.begin(), known.end(), board.task) == known.end()) {
    const std::string nearest = detail::nearest_name(board.task, known);
    throw Error(fmt::format("--task {}: no evaluation has this task; {}", board.task,
                            nearest.empty() ? fmt::format("there are {}", listed(known))
                                            : fmt::format("did you mean {}?", nearest)));
  }
  // Of a single task its accuracy is the mean.
  if (board.task == all_prompts && known.size() > 2) {
    board.tasks.assign(known.begin() + 1, known.end());
  }
  for (std::size_t i = 0; i < board.evaluations.size(); ++i) {
    for (SettingRow row : board.evaluations[i].rows) {
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
                   [&](const SettingRow& a, const SettingRow& b) {
                     return is_before(a.tasks.at(board.task), b.tasks.at(board.task));
                   });
  board.notes = notes_of(board.evaluations);
  return board;
}

// --- cells

/// As a table shows it, and what sorts it.
struct TableCell {
  std::string text;
  std::optional<double> number;
  std::string more;  // what pointing at it tells
};

struct TableColumn {
  std::string title;
  bool is_number;
};

std::string percent(double share) { return fmt::format("{:.1f}", 100 * share); }

std::string interval_of(const Figures& f) {
  return f.low && f.high ? fmt::format("[{}, {}]", percent(*f.low), percent(*f.high)) : "";
}

/// Accuracy, with its interval beside it or behind it, or else the perplexity.
TableCell quality(const Figures* f, bool with_interval) {
  if (f && f->accuracy) {
    const std::string interval = interval_of(*f);
    std::string text = percent(*f->accuracy);
    if (with_interval && !interval.empty()) text += " " + interval;
    return {text, f->accuracy, fmt::format("{} prompts {}", f->prompts, interval)};
  }
  if (f && f->perplexity) {
    return {fmt::format("perplexity {:.4g}", *f->perplexity), f->perplexity,
            fmt::format("{} prompts", f->prompts)};
  }
  return {"-", std::nullopt, ""};
}

/// Three digits of it, and all before the point.
std::string megabytes(double bytes) {
  const double value = bytes / 1e6;
  return value >= 100 ? fmt::format("{:.0f}", value)
                      : fmt::format("{:.{}f}", value, value >= 10 ? 1 : 2);
}

/// What a setting's label says beside the policy: "evict-ratio=0.5, prune-after=question".
std::string settings_text(const SettingRow& row) {
  if (row.policy == "none") return "full cache";
  std::string text = row.setting;
  if (text == row.policy) return "-";
  if (text.rfind(row.policy + "@", 0) == 0) text = text.substr(row.policy.size() + 1);
  std::string shown;
  for (const char c : text) shown += c == '@' ? std::string(", ") : std::string(1, c);
  return shown;
}

std::vector<TableColumn> columns_of(const Board& board) {
  std::vector<TableColumn> columns;
  if (board.has_evaluations()) columns.push_back({"evaluation", false});
  columns.insert(columns.end(), {{"model", false},
                                 {"policy", false},
                                 {"setting", false},
                                 {"about", true},
                                 {"evict ratio (least to most)", true}});
  const std::string what = board.task == all_prompts ? "all prompts" : board.task;
  columns.push_back({what + ", % [95 % interval]", true});
  for (const auto& task : board.tasks) columns.push_back({task + ", %", true});
  columns.insert(columns.end(), {{"KV, MB", true}, {"of full, %", true}, {"seconds", true}});
  return columns;
}

std::vector<TableCell> cells_of(const Board& board, const SettingRow& row) {
  const auto figures_of = [&](const std::string& task) {
    const auto found = row.tasks.find(task);
    return found == row.tasks.end() ? nullptr : &found->second;
  };
  const Figures& f = *figures_of(board.task);
  const JoinedEvaluation& evaluation = board.evaluations[row.evaluation];
  std::vector<TableCell> cells;
  if (board.has_evaluations()) cells.push_back({evaluation.name, std::nullopt, evaluation.folder});
  cells.push_back({evaluation.model, std::nullopt, ""});
  cells.push_back({row.policy, std::nullopt, ""});
  cells.push_back({settings_text(row), std::nullopt, row.setting});
  const double band = static_cast<double>(band_of(f)) / bands;
  cells.push_back({fmt::format("{:g}", band), band, ""});
  const std::string least = fmt::format("{:.2f}", f.least);
  const std::string most = fmt::format("{:.2f}", f.most);
  const std::string range = least == most ? "" : fmt::format(" ({} to {})", least, most);
  cells.push_back({fmt::format("{:.3f}{}", f.evict_ratio, range), f.evict_ratio, ""});
  cells.push_back(quality(&f, true));
  for (const auto& task : board.tasks) cells.push_back(quality(figures_of(task), false));
  cells.push_back({megabytes(f.kv_bytes), f.kv_bytes, ""});
  const double share = f.full_kv_bytes > 0 ? f.kv_bytes / f.full_kv_bytes : 1;
  cells.push_back({percent(share), share, ""});
  cells.push_back({fmt::format("{:.2f}", f.seconds), f.seconds, ""});
  return cells;
}

// --- pages

/// Names come from files that anybody may have written: no characters that steer a terminal or turn
/// the direction of the text around, all on one line.
std::string harmless(const std::string& text) {
  constexpr const char* replacement = "\xEF\xBF\xBD";
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0U;
    const auto last = i + 2 < text.size() ? static_cast<unsigned char>(text[i + 2]) : 0U;
    if (byte == '\t' || byte == '\n' || byte == '\r') {
      out += ' ';
    } else if (byte < 0x20 || byte == 0x7F) {
      out += replacement;
    } else if (byte == 0xC2 && next >= 0x80 && next < 0xA0) {  // U+0080 to U+009F
      out += replacement;
      i += 1;
    } else if (byte == 0xE2 && ((next == 0x80 && (last == 0x8E || last == 0x8F ||
                                                  (last >= 0xA8 && last <= 0xAE))) ||
                                (next == 0x81 && last >= 0xA6 && last <= 0xA9))) {
      // U+200E, U+200F, U+2028 to U+202E, U+2066 to U+2069
      out += replacement;
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; }

/// For a cell of a table.
std::string markdown(const std::string& raw) {
  const std::string text = harmless(raw);
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    // Between letters it is no emphasis, and names of tasks are full of them.
    const bool is_within_word =
        c == '_' && i > 0 && i + 1 < text.size() && is_word(text[i - 1]) && is_word(text[i + 1]);
    if (c == '<') {
      out += "&lt;";
    } else if (c == '&') {
      out += "&amp;";
    } else if (std::string_view("\\`*_[]>|~$@!").find(c) != std::string_view::npos &&
               !is_within_word) {
      out += std::string("\\") + c;
    } else {
      out += c;
    }
  }
  return out;
}

std::string html(const std::string& raw) {
  std::string out;
  for (const char c : harmless(raw)) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

constexpr const char* explanation =
    "Rows are in order of the evict ratio that was reached, to the nearest eighth (column about), "
    "and with the same one by accuracy, best first. KV: keys and values after pruning, a prompt's "
    "mean. Seconds: prefill and decode of all prompts.";

std::string markdown_page(const Board& board) {
  std::string text = "# Leaderboard\n\n";
  for (const auto& note : board.notes) text += "- " + markdown(note) + "\n";
  if (!board.notes.empty()) text += "\n";
  std::string rule;
  for (const auto& column : columns_of(board)) {
    text += "| " + markdown(column.title) + " ";
    rule += column.is_number ? "| ---: " : "| --- ";
  }
  text += "|\n" + rule + "|\n";
  for (const auto& row : board.rows) {
    for (const auto& cell : cells_of(board, row)) text += "| " + markdown(cell.text) + " ";
    text += "|\n";
  }
  return text + "\n" + explanation + "\n";
}

/// A click on a heading sorts by it: numbers the largest first, a second click the other way round.
/// Cells without a value stay last. It runs from file:// and fetches nothing.
constexpr const char* script = R"js(
const body = document.querySelector("tbody");
const buttons = [...document.querySelectorAll("th button")];
const collator = new Intl.Collator("en", {numeric: true});
buttons.forEach((button, column) => button.addEventListener("click", () => {
  const heading = button.parentElement;
  const isNumber = heading.classList.contains("number");
  const was = heading.getAttribute("aria-sort");
  const descends = was ? was === "ascending" : isNumber;
  buttons.forEach((other) => other.parentElement.removeAttribute("aria-sort"));
  heading.setAttribute("aria-sort", descends ? "descending" : "ascending");
  const value = (row) => {
    const cell = row.cells[column];
    return isNumber ? parseFloat(cell.dataset.value) : cell.textContent;
  };
  const rows = [...body.rows].map((row) => [value(row), row]);
  rows.sort(([a], [b]) => {
    if (isNumber && (isNaN(a) || isNaN(b))) return isNaN(a) - isNaN(b);
    const order = isNumber ? a - b : collator.compare(a, b);
    return descends ? -order : order;
  });
  body.append(...rows.map(([, row]) => row));
}));
)js";
/// Of the text above, so that browsers run it and nothing else (test_leaderboard.py checks it).
constexpr const char* script_sha256 = "88YA+lrCy8XcTVTueDjBl5ZMA8d0MJ0k9ml+wGAhCH0=";

constexpr const char* style = R"css(
body { font: 14px/1.4 sans-serif; margin: 1.5em; color: #111; background: #fff; }
table { border-collapse: collapse; }
th, td { padding: 0.25em 0.6em; border-bottom: 1px solid #ccc; text-align: left; }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
thead th { position: sticky; top: 0; background: #f2f2f2; vertical-align: bottom; }
th button { all: unset; cursor: pointer; font-weight: bold; }
th button:focus-visible { outline: 2px solid #0072B2; }
th[aria-sort="ascending"] button::after { content: " \25B2"; }
th[aria-sort="descending"] button::after { content: " \25BC"; }
tbody tr:hover { background: #eef6fb; }
)css";

std::string html_page(const Board& board, const std::string& version) {
  std::string text = fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
      "'unsafe-inline'; script-src 'sha256-{}'\">\n"
      "<meta name=\"viewport\" content=\"width=device-width\">\n"
      "<meta name=\"generator\" content=\"kvzap {}\">\n"
      "<title>Leaderboard</title>\n<style>{}</style>\n</head>\n<body>\n<h1>Leaderboard</h1>\n",
      script_sha256, html(version), style);
  if (!board.notes.empty()) text += "<ul>\n";
  for (const auto& note : board.notes) text += "<li>" + html(note) + "</li>\n";
  if (!board.notes.empty()) text += "</ul>\n";
  text += "<table>\n<thead><tr>";
  const auto columns = columns_of(board);
  for (const auto& column : columns) {
    text += fmt::format("<th scope=\"col\"{}><button type=\"button\">{}</button></th>",
                        column.is_number ? " class=\"number\"" : "", html(column.title));
  }
  text += "</tr></thead>\n<tbody>\n";
  for (const auto& row : board.rows) {
    text += "<tr>";
    const auto cells = cells_of(board, row);
    for (std::size_t i = 0; i < cells.size(); ++i) {
      const TableCell& cell = cells[i];
      text += columns[i].is_number ? "<td class=\"number\"" : "<td";
      if (cell.number) text += fmt::format(" data-value=\"{:.10g}\"", *cell.number);
      if (!cell.more.empty()) text += fmt::format(" title=\"{}\"", html(cell.more));
      text += fmt::format("><bdi>{}</bdi></td>", html(cell.text));
    }
    text += "</tr>\n";
  }
  return text +
         fmt::format("</tbody>\n</table>\n<p>{}</p>\n<script>{}</script>\n</body>\n</html>\n",
                     html(explanation), script);
}

ordered_json to_json(const Board& board, const std::string& version) {
  ordered_json page = {{"format", "kvzap.leaderboard"},
                       {"format_version", 1},
                       {"version", version},
                       {"task", board.task},
                       {"notes", board.notes},
                       {"rows", ordered_json::array()}};
  const auto maybe = [](const std::optional<double>& value) {
    return value ? ordered_json(*value) : ordered_json();
  };
  for (const auto& row : board.rows) {
    const JoinedEvaluation& evaluation = board.evaluations[row.evaluation];
    ordered_json tasks = ordered_json::object();
    for (const auto& [task, f] : row.tasks) {
      tasks[task] = {{"prompts", f.prompts},
                     {"accuracy", maybe(f.accuracy)},
                     {"accuracy_low", maybe(f.low)},
                     {"accuracy_high", maybe(f.high)},
                     {"perplexity", maybe(f.perplexity)},
                     {"evict_ratio_mean", f.evict_ratio},
                     {"evict_ratio_min", f.least},
                     {"evict_ratio_max", f.most},
                     {"kv_bytes", f.kv_bytes},
                     {"full_kv_bytes", f.full_kv_bytes},
                     {"seconds", f.seconds}};
    }
    page["rows"].push_back(
        {{"evaluation", evaluation.folder},
         {"model", evaluation.model},
         {"policy", row.policy},
         {"setting", row.setting},
         {"about", static_cast<double>(band_of(row.tasks.at(board.task))) / bands},
         {"tasks", std::move(tasks)}});
  }
  return page;
}

// --- the command

bool writes_html(const LeaderboardOptions& o) {
  if (!o.format.empty()) return o.format == "html";
  if (o.output.empty() || o.output == "-") return false;
  const std::string ending = fs::path(o.output).extension().string();
  if (ending == ".html" || ending == ".htm") return true;
  require(ending == ".md" || ending == ".markdown",
          fmt::format("-o {}: expected an ending of .md or .html, or --format", o.output));
  return false;
}

void check_leaderboard(const LeaderboardOptions& o) {
  require(!o.evaluations.empty(), "no evaluations: give folders that kvzap eval has written");
  require(!fs::is_directory(o.output),
          fmt::format("-o {}: is a folder; expected a file", o.output));
  writes_html(o);
  require(o.json != "-" || o.output != "-", "-o - and --json -: give one of them");
}

}  // namespace

void declare(CLI::App& app, LeaderboardOptions& o) {
  app.add_option("evaluations", o.evaluations, "folders that kvzap eval has written; required")
      ->type_name("DIR");
  app.add_option("-o,--output", o.output,
                 "write the page to this file, of the kind that its ending says: .md or .html; "
                 "default: Markdown on standard output")
      ->type_name("FILE");
  app.add_option("--format", o.format, "kind of the page, whatever the file is called")
      ->check(CLI::IsMember({"markdown", "html"}));
  app.add_option(
         "--task", o.task,
         "the task whose figures stand first and whose accuracy gives the order; all: every "
         "prompt counts once, and the tasks follow by themselves")
      ->type_name("NAME")
      ->capture_default_str();
  app.add_option("--json", o.json,
                 "write the joined rows to this file; - is standard output, in place of the page")
      ->type_name("FILE");
  declare_deck(app, o.config, "");
}

void leaderboard(const LeaderboardOptions& options, const Communicator& comm,
                 const std::string& version) {
  comm.agree_on_root([&] {
    check_leaderboard(options);
    const Board board = join(options);
    const std::string page =
        writes_html(options) ? html_page(board, version) : markdown_page(board);
    if (!options.json.empty()) {
      write_whole(
          options.json,
          to_json(board, version).dump(2, ' ', false, ordered_json::error_handler_t::replace) +
              "\n");
    }
    if (!options.output.empty() || options.json != "-") {
      write_whole(options.output.empty() ? "-" : options.output, page, "-o");
    }
    flush_stdout();
  });
}

}  // namespace kvzap::driver
