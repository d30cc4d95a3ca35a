// The pruning of one sequence, and the rules of a step that follow from it.
#pragma once

#include <cstdint>
#include <kvzap/engine/pruning.hpp>
#include <kvzap/engine/step_batch.hpp>

namespace kvzap::detail {

/// A pruning, and the component that scores for it in an engine.
struct SequencePruning : LoadedPruning {
  /// Whether the policy scores rows. Otherwise the engine's scorer does, if anything is pruned.
  bool uses_policy = false;

  /// `scorer`: the engine's, or null.
  SequencePruning(const LoadedPruning& loaded, const Scorer* scorer);
};

/// The rule of a step that the engine's scorer judges.
StepRule scorer_rule(bool judges, float threshold, std::int64_t sink);

/// Returns the rule of a step that reads `part`. `question`: number of tokens at its end that
/// belong to the question.
StepRule rule_of(const SequencePruning& pruning, StepPart part, std::int64_t question);

}  // namespace kvzap::detail
