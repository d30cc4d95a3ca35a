#include "engine/sequence_pruning.hpp"

namespace kvzap::detail {

bool uses_policy(const CacheOptions& options) {
  return options.prune != PruneMode::none && options.policy && options.policy->make &&
         !(options.policy->scorer && !options.policy->budget.has_amount() &&
           options.decode_every == 0);
}

bool chooses_rows(const PolicyChoice& choice) {
  return choice.budget.has_amount() || choice.info->has_own_budget;
}

StepRule scorer_rule(bool judges, float threshold, std::int64_t sink) {
  StepRule rule;
  rule.score = judges;
  rule.eviction = {threshold, sink, judges};
  return rule;
}

StepRule rule_of(const SequencePruning& pruning, std::int64_t sink, StepPart part,
                 std::int64_t question) {
  const bool is_context =
      part == StepPart::context || part == StepPart::whole || part == StepPart::held;
  const bool judges =
      pruning.prune == PruneMode::always || (is_context && pruning.prune == PruneMode::prefill);
  if (!pruning.uses_policy) {
    StepRule rule = scorer_rule(judges, pruning.threshold, sink);
    if (part == StepPart::held) rule.eviction.judge = false;
    return rule;
  }
  const PolicyChoice& choice = *pruning.policy;
  StepRule rule;
  rule.part = part;
  rule.question = question;
  // Without a budget a threshold decides, as pairs leave the window.
  rule.eviction = {static_cast<float>(choice.threshold), sink, judges && !chooses_rows(choice)};
  return rule;
}

CacheOptions with_setting(CacheOptions options, const PruneSetting& setting) {
  options.policy = setting.prune == PruneMode::none ? nullptr : setting.policy;
  options.prune = options.policy ? setting.prune : PruneMode::none;
  options.prune_after = setting.prune_after;
  options.prefill = setting.prefill;
  if (options.policy) options.threshold = static_cast<float>(options.policy->threshold);
  return options;
}

}  // namespace kvzap::detail
