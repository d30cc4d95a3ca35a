// What a run has to say: tables for people, JSON for machines.
#pragma once

#include <kvzap/engine/generate.hpp>
#include <kvzap/model/memory_plan.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "commands/quantiles.hpp"
#include "console/machine.hpp"
#include "options/options.hpp"
#include "options/policy_options.hpp"

namespace kvzap::driver {

struct AnsweredQuestion {
  std::string question;
  std::string text;
  Answer answer;
  std::vector<Quantiles> scores;  // as RunReport::context_scores
  /// A person has ended it (kvzap chat), which is then why it ends.
  bool is_interrupted = false;
  bool is_from_snapshot = false;  // a run before has answered it; its times are not known
};

/// Why it ends: of kvzap::StopReason, or "interrupted".
std::string_view stop_reason_of(const AnsweredQuestion& answered);

/// A snapshot that a run has written.
struct WrittenSnapshot {
  std::string file;
  std::int64_t tokens = 0;  // in the cache
  std::int64_t bytes = 0;
  double seconds = 0;          // until it was in its place
  double waiting_seconds = 0;  // of these the run waited
};

/// What a run goes on with.
struct ResumedFrom {
  std::string file;
  std::string kvzap_version;  // that wrote it
  std::int64_t bytes = 0;
  std::int64_t tokens = 0;          // in the cache
  std::int64_t context_tokens = 0;  // that had been run
  std::int64_t answer_tokens = 0;   // of the answer under way
  double seconds = 0;               // to read it
};

/// Everything a run measured; filled in as it goes.
struct RunReport {
  std::string version;
  std::string revision;
  Machine machine;
  std::string flags;  // of options_in_force
  ModelConfig model;
  std::int64_t all_layers = 0;                 // of the checkpoint; model has those in use
  std::string surrogate_kind;                  // empty: none
  std::string policy;                          // as parse_policy takes it; empty: nothing is pruned
  std::optional<LookedUpThreshold> looked_up;  // where the options' threshold is from
  bool is_full_at_first = true;  // nothing is evicted before the whole cache has been there
  CacheOptions cache_options;
  int ranks = 1;
  std::int64_t context_tokens = 0;
  std::int64_t prefill_tokens = 0;  // of them, run by this run
  std::optional<ResumedFrom> resumed;
  std::vector<WrittenSnapshot> snapshots;
  int signal = 0;  // that has ended the run early
  /// Where that was: of "load", "texts", "context", "repeat", "question" or "answer" so many steps
  /// (load: parts of the weights; else tokens) of the total.
  std::string stopped_in;
  std::int64_t stopped_after = 0;
  std::int64_t stopped_of = 0;
  /// The answer under way, if one was.
  std::optional<AnsweredQuestion> unfinished;
  double load_seconds = 0;
  std::int64_t texts = 0;  // from which the policy has learned
  double texts_seconds = 0;
  double prefill_seconds = 0;
  CacheReport context;
  /// Of the scores of kept rows, layer by layer; empty: not known.
  std::vector<Quantiles> context_scores;
  std::vector<AnsweredQuestion> answers;
  // For --json-token-ids.
  std::vector<TokenId> context_ids;
  std::vector<std::vector<TokenId>> question_ids;
  std::vector<std::int64_t> weight_bytes;    // per rank
  std::vector<std::int64_t> peak_rss_bytes;  // per rank
};

/// "335.5 GB"; decimal units.
std::string human_bytes(std::int64_t bytes);

/// "[2] What is that?", for answers to several questions: the question as one line, shortened.
std::string answer_heading(std::size_t number, const std::string& question);

nlohmann::ordered_json to_json(const RunReport& report, const RunOptions& options);
std::string to_text(const RunReport& report, const RunOptions& options);
/// That a signal has ended the run, and what to do about it.
std::string stop_text(const RunReport& report, const RunOptions& options);

/// What --dry-run finds out.
struct PlanReport {
  MemoryPlan plan;
  std::int64_t tokens = 0;
  PlannedEviction eviction;
  int most_ranks = 1;  // that the model can be dealt to
  /// The node on which least would be left, of all that ranks are on.
  int nodes = 1;
  int ranks_on_node = 1;
  std::int64_t needed_on_node = 0;
  std::int64_t available_on_node = -1;  // -1: not known, as on a device
  /// Fewest nodes like this one, with as many ranks each, that would do; 0: none. Of interest
  /// where it does not fit.
  int nodes_that_fit = 0;

  bool is_known() const { return available_on_node >= 0; }
  bool fits() const { return needed_on_node <= available_on_node; }
};

/// What a rank (or all of them: MemoryPlan) has at most at any one time.
std::int64_t needed_bytes(const MemoryPlan::Rank& part, bool is_full_at_first);
std::int64_t needed_bytes(const MemoryPlan& part, bool is_full_at_first);

std::string to_text(const PlanReport& report, const ModelConfig& model, DType dtype);
nlohmann::ordered_json to_json(const PlanReport& report, const RunOptions& options);

/// Kept rows [layer][KV head] from the JSON file of an earlier run. Throws Error naming file and
/// field if they are not there or do not fit the model.
std::vector<std::vector<std::int64_t>> read_kept_rows(const std::string& file,
                                                      const ModelConfig& model);

}  // namespace kvzap::driver
