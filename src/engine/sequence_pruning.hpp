// How one sequence is pruned, and the rules of a step that follow from it.
#pragma once

#include <cstdint>
#include <kvzap/engine/engine.hpp>
#include <memory>

namespace kvzap::detail {

/// Whether a policy scores rows; with a threshold alone a scorer does what its policy would.
bool uses_policy(const CacheOptions& options);

/// Whether a budget or the policy itself chooses rows; otherwise a threshold judges them.
bool chooses_rows(const PolicyChoice& choice);

/// How a sequence is pruned.
struct SequencePruning {
  std::shared_ptr<const PolicyChoice> policy;
  PruneMode prune = PruneMode::none;
  PrefillMode prefill = PrefillMode::dense;
  float threshold = 0;  // of the engine's scorer
  bool uses_policy = false;
};

/// The rule of a step that the engine's scorer judges.
StepRule scorer_rule(bool judges, float threshold, std::int64_t sink);

/// The rule of a step that reads `part`; `question`: the number of its last tokens that ask.
StepRule rule_of(const SequencePruning& pruning, std::int64_t sink, StepPart part,
                 std::int64_t question);

/// The options of an engine that prunes all its sequences as `setting` says.
CacheOptions with_setting(CacheOptions options, const PruneSetting& setting);

}  // namespace kvzap::detail
