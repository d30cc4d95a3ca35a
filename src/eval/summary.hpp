// Results of an evaluation: a row for every task and setting.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "eval/records.hpp"
#include "eval/settings.hpp"

namespace kvzap::eval {

struct SummaryOptions {
  std::uint64_t seed = 0;    // of the bootstrap
  int resamples = 2000;      // of the bootstrap
  std::int64_t pass_k = 0;   // 0: no pass@k
  std::int64_t prompts = 0;  // of the whole evaluation
};

/// Summarizes records. Their order does not matter.
class EvaluationSummary {
 public:
  EvaluationSummary(std::vector<EvalSetting> settings, SummaryOptions options);

  /// Adds a record. Tasks keep the order of their first record or of `add_task`.
  void add(const EvalRecord& record);
  void add_task(const std::string& task);
  std::int64_t prompts() const { return m_prompts; }

  /// Returns summary.json without its head: {"prompts", "complete", "rows": […]}.
  nlohmann::ordered_json rows() const;
  /// Returns summary.csv: the same rows without keep ratios.
  std::string csv() const;
  /// Returns a table of at most 120 columns.
  std::string table() const;

 private:
  struct Prompt {
    std::string file;
    std::int64_t line;
    std::optional<double> score;
    double pass;
    std::optional<double> nll;
    std::int64_t tokens;  // of the continuation
    double evict_ratio;
    double kv_bytes;
    double full_kv_bytes;
    double kv_bytes_at_end;
    double full_kv_bytes_at_end;
    double prefill_seconds;
    double decode_seconds;
  };
  struct Cell {
    std::vector<Prompt> prompts;
    std::vector<std::vector<double>> keep_ratios;  // sums, [layer][head]
  };
  using Key = std::pair<std::size_t, std::size_t>;  // task, setting

  void add_to(Cell& cell, const Prompt& prompt, const EvalRecord& record);
  nlohmann::ordered_json row(const std::string& task, const EvalSetting& setting,
                             const Cell& cell) const;

  std::vector<EvalSetting> m_settings;
  SummaryOptions m_options;
  std::map<std::string, std::size_t> m_setting_of;
  std::map<std::string, std::size_t> m_task_of;
  std::vector<std::string> m_tasks;
  std::map<Key, Cell> m_cells;
  std::vector<Cell> m_all;  // of each setting
  std::int64_t m_prompts = 0;
};

}  // namespace kvzap::eval
