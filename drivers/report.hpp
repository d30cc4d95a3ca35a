// What a run has to say: tables for people, JSON for machines.
#pragma once

#include <kvzap/generate.hpp>
#include <kvzap/memory_plan.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "options.hpp"
#include "policy_options.hpp"

namespace kvzap::driver {

struct AnsweredQuestion {
  std::string question;
  std::string text;
  Answer answer;
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
  std::vector<AnsweredQuestion> answers;
  std::vector<std::int64_t> weight_bytes;    // per rank
  std::vector<std::int64_t> peak_rss_bytes;  // per rank
};

/// "335.5 GB"; decimal units.
std::string human_bytes(std::int64_t bytes);

nlohmann::ordered_json to_json(const RunReport& report, const RunOptions& options);
std::string to_text(const RunReport& report, const RunOptions& options);
/// That a signal has ended the run, and what to do about it.
std::string stop_text(const RunReport& report, const RunOptions& options);
std::string to_text(const MemoryPlan& plan, const ModelConfig& model, DType dtype,
                    std::int64_t tokens, double evict_ratio);
nlohmann::ordered_json to_json(const MemoryPlan& plan, const RunOptions& options,
                               std::int64_t tokens, double evict_ratio);

/// Kept rows [layer][KV head] from the JSON file of an earlier run. Throws Error naming file and
/// field if they are not there or do not fit the model.
std::vector<std::vector<std::int64_t>> read_kept_rows(const std::string& file,
                                                      const ModelConfig& model);

}  // namespace kvzap::driver
