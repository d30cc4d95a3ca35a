#include "engine/sequence_pruning.hpp"

namespace kvzap::detail {

SequencePruning::SequencePruning(const LoadedPruning& loaded, const Scorer* scorer)
    : LoadedPruning(loaded) {
  uses_policy = prunes() && policy && !(is_judged_by_scorer() && policy->scorer.get() == scorer);
}

StepRule scorer_rule(bool judges, float threshold, std::int64_t sink) {
  StepRule rule;
  rule.score = judges;
  rule.eviction = {threshold, sink, judges};
  return rule;
}

StepRule rule_of(const SequencePruning& pruning, StepPart part, std::int64_t question) {
  const bool is_context =
      part == StepPart::context || part == StepPart::whole || part == StepPart::held;
  const PruneMode mode = pruning.mode();
  const bool judges = mode == PruneMode::always || (is_context && mode == PruneMode::prefill);
  if (!pruning.uses_policy) {
    StepRule rule = scorer_rule(judges, pruning.threshold(), pruning.pruning.sink);
    if (part == StepPart::held) rule.eviction.judge = false;
    return rule;
  }
  StepRule rule;
  rule.part = part;
  rule.question = question;
  // Without a budget, a threshold judges pairs as they leave the window.
  rule.eviction = {pruning.threshold(), pruning.pruning.sink, judges && !pruning.chooses_rows()};
  return rule;
}

}  // namespace kvzap::detail
