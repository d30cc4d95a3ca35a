#include "eval/summary.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <kvzap/lab/metrics.hpp>
#include <tuple>

#include "files/counted.hpp"

namespace kvzap::eval {
namespace {

using nlohmann::ordered_json;

constexpr const char* all_tasks = "all";

/// Returns the mean of the values in a fixed order, so that it does not depend on the order of
/// records.
template <class Prompts, class Value>
double sum_of(const Prompts& prompts, Value value) {
  double sum = 0;
  for (const auto& prompt : prompts) sum += value(prompt);
  return sum;
}

/// Returns null for NaN, which JSON lacks. Rounds to the effect of one prompt in a million.
double rounded(double value) {
  constexpr double digits = 1e6;
  return std::round(value * digits) / digits;
}

std::string csv_text(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

const std::vector<const char*> csv_columns = {"task",
                                              "setting",
                                              "policy",
                                              "evict_ratio_asked",
                                              "threshold",
                                              "keep_tokens",
                                              "kv_budget",
                                              "prune_after",
                                              "prune",
                                              "prefill",
                                              "prompts",
                                              "accuracy",
                                              "accuracy_low",
                                              "accuracy_high",
                                              "pass_at_k",
                                              "pass_at_k_low",
                                              "pass_at_k_high",
                                              "perplexity",
                                              "evict_ratio_mean",
                                              "evict_ratio_min",
                                              "evict_ratio_max",
                                              "kv_bytes",
                                              "full_kv_bytes",
                                              "kv_bytes_at_end",
                                              "full_kv_bytes_at_end",
                                              "prefill_seconds",
                                              "decode_seconds"};

std::string csv_field(const ordered_json& row, const char* column) {
  const auto found = row.find(column);
  if (found == row.end() || found->is_null()) return "";
  return found->is_string() ? csv_text(found->get<std::string>()) : found->dump();
}

/// Number of code points, each assumed to be one column wide.
std::size_t columns_of(const std::string& text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

/// Splits a text into lines of at most `width` columns.
std::string in_lines(const std::string& text, std::size_t widest) {
  std::string lines;
  std::size_t column = 0;
  for (const char c : text) {
    const bool begins = (c & 0xc0) != 0x80;
    if (begins && column++ == widest) {
      lines += '\n';
      column = 1;
    }
    lines += c;
  }
  return lines;
}

/// Puts a label in a column of `width`. A longer label is put on lines above its row, because any
/// part of it may distinguish settings.
std::string label_column(const std::string& label, std::size_t width, std::size_t widest) {
  const std::size_t columns = columns_of(label);
  if (columns <= width) return label + std::string(width - columns, ' ');
  return in_lines(label, widest) + '\n' + std::string(width, ' ');
}

double number_in(const ordered_json& row, const char* field) {
  const auto found = row.find(field);
  return found == row.end() || found->is_null() ? std::nan("") : found->get<double>();
}

/// Returns a row's setting in words.
std::string words_of(const ordered_json& row) {
  const auto threshold = row.find("threshold");
  return setting_words(
      row.at("setting").get<std::string>(), number_in(row, "evict_ratio_mean"),
      threshold == row.end() ? std::nullopt : std::optional(threshold->get<double>()));
}

}  // namespace

EvaluationSummary::EvaluationSummary(std::vector<EvalSetting> settings, SummaryOptions options)
    : m_settings(std::move(settings)), m_options(options), m_all(m_settings.size()) {
  for (std::size_t i = 0; i < m_settings.size(); ++i) m_setting_of[m_settings[i].label] = i;
}

void EvaluationSummary::add_task(const std::string& task) {
  if (m_task_of.emplace(task, m_tasks.size()).second) m_tasks.push_back(task);
}

void EvaluationSummary::add_to(Cell& cell, const Prompt& prompt, const EvalRecord& record) {
  cell.prompts.push_back(prompt);
  auto& sums = cell.keep_ratios;
  sums.resize(std::max(sums.size(), record.kept_rows.size()));
  for (std::size_t layer = 0; layer < record.kept_rows.size(); ++layer) {
    const auto& rows = record.kept_rows[layer];
    sums[layer].resize(std::max(sums[layer].size(), rows.size()));
    for (std::size_t head = 0; head < rows.size(); ++head) {
      sums[layer][head] += static_cast<double>(rows[head]) /
                           static_cast<double>(std::max<std::int64_t>(1, record.cache_tokens));
    }
  }
}

void EvaluationSummary::add(const EvalRecord& record) {
  const auto setting = m_setting_of.find(record.setting);
  if (setting == m_setting_of.end()) return;
  add_task(record.task);
  Prompt prompt{record.task_file,
                record.line,
                record.score,
                0,
                record.nll,
                record.generated_tokens,
                record.evict_ratio,
                static_cast<double>(record.kv_bytes),
                static_cast<double>(record.full_kv_bytes),
                static_cast<double>(record.kv_bytes_at_end),
                static_cast<double>(record.full_kv_bytes_at_end),
                record.prefill_seconds,
                record.decode_seconds};
  if (m_options.pass_k > 0 && record.score) {
    const auto right = std::count_if(record.scores.begin(), record.scores.end(),
                                     [](double score) { return score >= 1; });
    prompt.pass =
        pass_at_k(static_cast<std::int64_t>(record.scores.size()), right, m_options.pass_k);
  }
  add_to(m_cells[{m_task_of.at(record.task), setting->second}], prompt, record);
  add_to(m_all[setting->second], prompt, record);
  if (setting->second == 0) ++m_prompts;
}

ordered_json EvaluationSummary::row(const std::string& task, const EvalSetting& setting,
                                    const Cell& cell) const {
  std::vector<Prompt> prompts = cell.prompts;
  std::sort(prompts.begin(), prompts.end(), [](const Prompt& a, const Prompt& b) {
    return std::tie(a.file, a.line) < std::tie(b.file, b.line);
  });
  const auto count = static_cast<double>(prompts.size());
  std::vector<double> scores, passes;
  double nll = 0;
  std::int64_t tokens = 0;
  for (const Prompt& prompt : prompts) {
    if (prompt.score) {
      scores.push_back(*prompt.score);
      passes.push_back(prompt.pass);
    }
    if (prompt.nll) {
      nll += *prompt.nll;
      tokens += prompt.tokens;
    }
  }

  ordered_json made = to_json(setting);
  ordered_json json = {{"task", task}, {"setting", setting.label}, {"policy", made["policy"]}};
  if (made.contains("evict_ratio")) json["evict_ratio_asked"] = made["evict_ratio"];
  for (const char* field :
       {"threshold", "keep_tokens", "kv_budget", "prune_after", "prune", "prefill"}) {
    if (made.contains(field)) json[field] = made[field];
  }
  json["prompts"] = prompts.size();
  if (!scores.empty()) {
    const Interval accuracy = mean_of_scores(scores, m_options.seed, m_options.resamples);
    json["accuracy"] = accuracy.mean;
    json["accuracy_low"] = accuracy.low;
    json["accuracy_high"] = accuracy.high;
    if (m_options.pass_k > 0) {
      const Interval pass = mean_of_scores(passes, m_options.seed, m_options.resamples);
      json["pass_at_k"] = pass.mean;
      json["pass_at_k_low"] = pass.low;
      json["pass_at_k_high"] = pass.high;
    }
  }
  if (tokens > 0) {
    const double perplexity = std::exp(nll / static_cast<double>(tokens));
    json["perplexity"] = std::isfinite(perplexity) ? ordered_json(perplexity) : ordered_json();
  }
  const auto by_ratio = std::minmax_element(
      prompts.begin(), prompts.end(),
      [](const Prompt& a, const Prompt& b) { return a.evict_ratio < b.evict_ratio; });
  json["evict_ratio_mean"] = sum_of(prompts, [](const Prompt& p) { return p.evict_ratio; }) / count;
  json["evict_ratio_min"] = by_ratio.first->evict_ratio;
  json["evict_ratio_max"] = by_ratio.second->evict_ratio;
  json["kv_bytes"] = sum_of(prompts, [](const Prompt& p) { return p.kv_bytes; }) / count;
  json["full_kv_bytes"] = sum_of(prompts, [](const Prompt& p) { return p.full_kv_bytes; }) / count;
  json["kv_bytes_at_end"] =
      sum_of(prompts, [](const Prompt& p) { return p.kv_bytes_at_end; }) / count;
  json["full_kv_bytes_at_end"] =
      sum_of(prompts, [](const Prompt& p) { return p.full_kv_bytes_at_end; }) / count;
  json["prefill_seconds"] = sum_of(prompts, [](const Prompt& p) { return p.prefill_seconds; });
  json["decode_seconds"] = sum_of(prompts, [](const Prompt& p) { return p.decode_seconds; });
  ordered_json keep_ratio = ordered_json::array();
  for (const auto& layer : cell.keep_ratios) {
    ordered_json heads = ordered_json::array();
    for (const double sum : layer) heads.push_back(rounded(sum / count));
    keep_ratio.push_back(std::move(heads));
  }
  json["keep_ratio"] = std::move(keep_ratio);
  return json;
}

ordered_json EvaluationSummary::rows() const {
  ordered_json rows = ordered_json::array();
  for (std::size_t task = 0; task < m_tasks.size(); ++task) {
    for (std::size_t setting = 0; setting < m_settings.size(); ++setting) {
      const auto cell = m_cells.find({task, setting});
      if (cell == m_cells.end()) continue;
      rows.push_back(row(m_tasks[task], m_settings[setting], cell->second));
    }
  }
  for (std::size_t setting = 0; setting < m_settings.size(); ++setting) {
    if (m_all[setting].prompts.empty()) continue;
    rows.push_back(row(all_tasks, m_settings[setting], m_all[setting]));
  }
  ordered_json json = {{"prompts", m_prompts},
                       {"complete", m_prompts == m_options.prompts},
                       {"bootstrap_samples", m_options.resamples}};
  if (m_options.pass_k > 0) json["pass_k"] = m_options.pass_k;
  json["rows"] = std::move(rows);
  return json;
}

std::string EvaluationSummary::csv() const {
  std::string text = fmt::format("{}\n", fmt::join(csv_columns, ","));
  const ordered_json summary = rows();
  for (const ordered_json& row : summary.at("rows")) {
    for (std::size_t i = 0; i < csv_columns.size(); ++i) {
      text += (i == 0 ? "" : ",") + csv_field(row, csv_columns[i]);
    }
    text += '\n';
  }
  return text;
}

std::string EvaluationSummary::table() const {
  constexpr std::size_t widest = 120;
  const bool has_pass = m_options.pass_k > 0;
  const std::string head =
      fmt::format("{:>8}  {:>14}  {}{:>17}  {:>9}  {:>9}  {:>9}", "accuracy", "95 % interval",
                  has_pass ? fmt::format("{:>7}  ", fmt::format("pass@{}", m_options.pass_k)) : "",
                  "evict ratio", "KV MiB", "prefill s", "decode s");
  const ordered_json summary = rows();
  std::size_t width = 8;
  for (const ordered_json& row : summary.at("rows")) {
    width = std::max(width, columns_of(words_of(row)));
  }
  width = std::min(width, widest - 2 - head.size());

  std::string text, task;
  for (const ordered_json& row : summary.at("rows")) {
    if (row.at("task") != task) {
      if (!text.empty()) text += '\n';
      task = row.at("task").get<std::string>();
      text += in_lines(fmt::format("{}: {}", task,
                                   files::counted(row.at("prompts").get<std::int64_t>(), "prompt")),
                       widest);
      text += '\n';
      text += fmt::format("{}  {}\n", label_column("setting", width, widest), head);
    }
    std::string accuracy(8 + 2 + 14, ' ');
    if (row.contains("accuracy")) {
      accuracy = fmt::format("{:>8.3f}  {:>14}", number_in(row, "accuracy"),
                             fmt::format("{:.3f} to {:.3f}", number_in(row, "accuracy_low"),
                                         number_in(row, "accuracy_high")));
    } else if (row.contains("perplexity")) {
      accuracy =
          fmt::format("{:>24}", fmt::format("perplexity {:.5g}", number_in(row, "perplexity")));
    }
    const double least = number_in(row, "evict_ratio_min");
    const double most = number_in(row, "evict_ratio_max");
    const std::string ratio =
        fmt::format("{:.3f} ({:.2f}-{:.2f})", number_in(row, "evict_ratio_mean"), least, most);
    constexpr double mib = 1 << 20;
    text += fmt::format("{}  {}  {}{:>17}  {:>9.2f}  {:>9.2f}  {:>9.2f}\n",
                        label_column(words_of(row), width, widest), accuracy,
                        has_pass ? fmt::format("{:>7.3f}  ", number_in(row, "pass_at_k")) : "",
                        ratio, number_in(row, "kv_bytes_at_end") / mib,
                        number_in(row, "prefill_seconds"), number_in(row, "decode_seconds"));
  }
  return text;
}

}  // namespace kvzap::eval
