// State of one sequence of an engine, beside its rows in the cache.
#pragma once

#include <cstdint>
#include <kvzap/engine/policy.hpp>
#include <memory>
#include <optional>
#include <vector>

#include "engine/policy_step.hpp"
#include "engine/sequence_pruning.hpp"

namespace kvzap::engine {

/// State that a policy needs between steps.
struct SequenceState {
  std::shared_ptr<const SequencePruning> pruning;
  std::unique_ptr<Policy> policy;
  std::optional<RecentQueries> recent;
  std::optional<AttentionSums> sums;
  /// Steps since the context or the last cut; without cuts of answers those without scores.
  std::int64_t steps = 0;
  std::int64_t removed_tokens = 0;  // evicted before positions were renumbered
  std::int64_t non_finite = 0;      // rows that the last cut kept because their score is not finite
  std::vector<TokenId> context;     // for a policy that repeats it
  bool is_in_parts = false;         // a context of which parts have run, but not the last one
  // Of the current step.
  PolicyStep step;
  EvictionPlan plan;

  /// Copies everything but the policy object, which serves one sequence and holds nothing between
  /// steps.
  SequenceState copy(SequenceState into) const {
    if (recent) into.recent = recent->clone();
    if (sums) into.sums = sums->clone();
    into.steps = steps;
    into.removed_tokens = removed_tokens;
    into.non_finite = non_finite;
    into.context = context;
    into.is_in_parts = is_in_parts;
    into.pruning = pruning;
    return into;
  }
};

}  // namespace kvzap::engine
