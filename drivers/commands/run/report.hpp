// The report of a run: tables for people, JSON for programs.
#pragma once

#include <kvzap/engine/generate.hpp>
#include <kvzap/engine/thresholds.hpp>
#include <kvzap/model/memory_plan.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "commands/lab/quantiles.hpp"
#include "console/machine.hpp"
#include "options/options.hpp"
#include "options/policy_options.hpp"
#include "session/conversation_state.hpp"

namespace kvzap::driver {

using session::AnsweredQuestion;

/// Returns "was cut after N tokens …" for an answer that the model did not end itself, else "".
std::string cut_text(const Answer& answer);

/// A snapshot that a run has written.
struct WrittenSnapshot {
  std::string file;
  std::int64_t tokens = 0;  // in the cache
  std::int64_t bytes = 0;
  double seconds = 0;          // until the file was in place
  double waiting_seconds = 0;  // seconds that the run waited for it
};

/// The snapshot that a run continues.
struct ResumedFrom {
  std::string file;
  std::string kvzap_version;  // version that wrote it
  std::int64_t bytes = 0;
  std::int64_t tokens = 0;          // in the cache
  std::int64_t context_tokens = 0;  // tokens of the context that had been run
  std::int64_t answer_tokens = 0;   // tokens of the unfinished answer
  double seconds = 0;               // to read it
};

/// Everything that a run measured; filled during the run.
struct RunReport {
  std::string version;
  std::string revision;
  Machine machine;
  std::string flags;  // of options_in_force
  ModelConfig model;
  std::int64_t all_layers = 0;                 // of the checkpoint; `model` has the layers in use
  std::string surrogate_kind;                  // empty: none
  std::string policy;                          // as parse_policy reads it; empty: nothing is pruned
  std::optional<LookedUpThreshold> looked_up;  // source of the options' threshold
  bool is_full_at_first = true;                // the whole cache exists before the first eviction
  CacheOptions cache_options;
  int ranks = 1;
  std::int64_t context_tokens = 0;
  std::int64_t prefill_tokens = 0;  // tokens that this run itself has run
  std::optional<ResumedFrom> resumed;
  std::vector<WrittenSnapshot> snapshots;
  int signal = 0;  // signal that ended the run early
  /// The stage in which a signal ended it: "load", "texts", "context", "repeat", "question" or
  /// "answer". Then the steps done and in total: parts of the weights for "load", otherwise tokens.
  std::string stopped_in;
  std::int64_t stopped_after = 0;
  std::int64_t stopped_of = 0;
  /// The unfinished answer, if there was one.
  std::optional<AnsweredQuestion> unfinished;
  double load_seconds = 0;
  std::int64_t texts = 0;  // number of texts from which the policy has learned
  double texts_seconds = 0;
  double prefill_seconds = 0;
  CacheReport context;
  /// Scores of kept rows, layer by layer; empty: unknown.
  std::vector<Quantiles> context_scores;
  std::vector<AnsweredQuestion> answers;
  /// Scores of kept rows after each answer; fewer entries: unknown.
  std::vector<std::vector<Quantiles>> answer_scores;
  // For --json-token-ids.
  std::vector<TokenId> context_ids;
  std::vector<std::vector<TokenId>> question_ids;
  std::vector<std::int64_t> weight_bytes;    // per rank
  std::vector<std::int64_t> peak_rss_bytes;  // per rank
  std::vector<Traffic> traffic;              // per rank
};

/// Formats bytes in decimal units: "335.5 GB".
std::string human_bytes(std::int64_t bytes);

/// Returns the heading of one of several answers, "[2] What is that?": the question as one line,
/// shortened.
std::string answer_heading(std::size_t number, const std::string& question);

nlohmann::ordered_json to_json(const RunReport& report, const RunOptions& options);
std::string to_text(const RunReport& report, const RunOptions& options);
/// Returns the message that a signal has ended the run, and how to continue.
std::string stop_text(const RunReport& report, const RunOptions& options);

/// The results of --dry-run.
struct PlanReport {
  MemoryPlan plan;
  std::int64_t tokens = 0;
  PlannedEviction eviction;
  int most_ranks = 1;  // largest number of ranks for the model
  /// The number of nodes, and the node with the least free memory of all nodes with ranks.
  int nodes = 1;
  int ranks_on_node = 1;
  std::int64_t needed_on_node = 0;
  std::int64_t available_on_node = -1;  // -1: not known, as on a device
  /// Smallest number of nodes like this one, with the same number of ranks each, that suffices; 0:
  /// none. Only valid if the plan does not fit.
  int nodes_that_fit = 0;

  bool is_known() const { return available_on_node >= 0; }
  bool fits() const { return needed_on_node <= available_on_node; }
};

/// Returns the peak memory of a rank (or of all ranks: MemoryPlan).
std::int64_t needed_bytes(const MemoryPlan::Rank& part, bool is_full_at_first);
std::int64_t needed_bytes(const MemoryPlan& part, bool is_full_at_first);

std::string to_text(const PlanReport& report, const ModelConfig& model, DType dtype);
nlohmann::ordered_json to_json(const PlanReport& report, const RunOptions& options);

/// Reads kept rows [layer][KV head] from the report of an earlier run or of a calibration. Throws
/// Error that names file and field if they are missing or do not fit the model.
std::vector<std::vector<std::int64_t>> read_kept_rows(const std::string& file,
                                                      const ModelConfig& model);

}  // namespace kvzap::driver
