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
std::string to_text(const MemoryPlan& plan, const ModelConfig& model, DType dtype,
                    std::int64_t tokens, double evict_ratio);
nlohmann::ordered_json to_json(const MemoryPlan& plan, const RunOptions& options,
                               std::int64_t tokens, double evict_ratio);

/// Kept rows [layer][KV head] from the JSON file of an earlier run. Throws Error naming file and
/// field if they are not there or do not fit the model.
std::vector<std::vector<std::int64_t>> read_kept_rows(const std::string& file,
                                                      const ModelConfig& model);

}  // namespace kvzap::driver
