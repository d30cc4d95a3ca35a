#include "engine/sequence_pruning.hpp"

#include <algorithm>

namespace kvzap::engine {
namespace {

using When = EvictionMoment::When;

/// Whether pairs that leave the ring in such a step are judged by a threshold.
bool judges(const SequencePruning& pruning, StepPart part) {
  if (part == StepPart::held || (pruning.uses_policy && pruning.chooses_rows())) return false;
  return pruning.mode() == PruneMode::always ||
         (is_context(part) && pruning.mode() == PruneMode::prefill);
}

/// The budget of cuts after the context.
Budget decode_budget(const Budget& context, const Pruning::DecodeCuts& cuts) {
  Budget budget = context;
  budget.amount = cuts.keep ? Budget::Amount::keep_tokens : Budget::Amount::evict_ratio;
  budget.keep_tokens = cuts.keep.value_or(0);
  budget.evict_ratio = cuts.evict_ratio.value_or(0);
  budget.layer_ratios.clear();
  budget.head_ratios = nullptr;
  return budget;
}

/// A cut is due after `every` steps. As in kvpress' DecodingPress, it is due at once if a question
/// is as long as the rows that a cut leaves.
bool is_due(const Pruning::DecodeCuts& cuts, const EvictionMoment& moment) {
  if (cuts.every == 0) return false;
  const std::int64_t tokens = moment.tokens + moment.count;
  const auto left = static_cast<std::int64_t>(tokens * (1 - cuts.evict_ratio.value_or(0)));
  const std::int64_t target = cuts.keep ? *cuts.keep : std::max<std::int64_t>(1, left);
  return moment.steps + 1 >= cuts.every || moment.count >= target;
}

/// The plan of a step for a policy that chooses rows, or has them chosen after the context.
EvictionPlan plan_choice(const SequencePruning& pruning, const EvictionMoment& moment) {
  EvictionPlan plan;
  const PolicyChoice& choice = *pruning.policy;
  plan.empties_ring = choice.rerotate;
  if (moment.part == StepPart::other || moment.part == StepPart::held ||
      choice.info->repeats_context) {
    return plan;
  }
  if (!is_context(moment.part)) {
    plan.is_in_decode = pruning.pruning.decode.every > 0;
    plan.budget = decode_budget(choice.budget, pruning.pruning.decode);
    if (is_due(pruning.pruning.decode, moment)) plan.method = EvictionMethod::evict_by_flags;
    return plan;
  }
  if (!pruning.chooses_rows()) return plan;
  plan.budget = choice.budget;
  const bool is_first = moment.tokens == 0;
  plan.method = is_first && plan.budget.by_layer() ? EvictionMethod::append_kept
                                                   : EvictionMethod::evict_by_flags;
  // append_kept leaves no row in a ring; the last part of a context becomes equal to that.
  plan.empties_ring = plan.empties_ring || (moment.ends_parts && plan.budget.by_layer());
  return plan;
}

}  // namespace

SequencePruning::SequencePruning(const LoadedPruning& loaded, const Scorer* scorer)
    : LoadedPruning(loaded) {
  uses_policy = prunes() && policy && !(is_judged_by_scorer() && policy->scorer.get() == scorer);
}

EvictionPlan plan_eviction(const SequencePruning& pruning, const EvictionMoment& moment) {
  EvictionPlan plan;
  if (!pruning.prunes()) return plan;
  if (moment.when == When::context_held) {
    plan.method = EvictionMethod::evict_by_cutoffs;
    return plan;
  }
  if (moment.when == When::step) {
    if (pruning.uses_policy) plan = plan_choice(pruning, moment);
    if (plan.method == EvictionMethod::none && judges(pruning, moment.part))
      plan.method = EvictionMethod::append;
    return plan;
  }
  plan.method = EvictionMethod::evict_by_flags;
  if (!pruning.chooses_rows()) return plan;
  const PolicyChoice& choice = *pruning.policy;
  plan.budget = choice.budget;
  // A layer that is chosen before the next one runs leaves no row in a ring; a reading's forks
  // become equal to that.
  plan.empties_ring =
      choice.rerotate || (moment.when == When::context_read && choice.budget.by_layer() &&
                          !choice.info->repeats_context);
  return plan;
}

StepRule scorer_rule(bool judges, float threshold, std::int64_t sink) {
  StepRule rule;
  rule.score = judges;
  rule.eviction = {threshold, sink, judges};
  return rule;
}

StepRule rule_of(const SequencePruning& pruning, StepPart part, std::int64_t question) {
  const float threshold = pruning.threshold();
  const std::int64_t sink = pruning.pruning.sink;
  if (part == StepPart::held && !pruning.uses_policy) {
    StepRule rule = scorer_rule(pruning.prunes(), threshold, sink);
    rule.eviction.judge = false;
    return rule;
  }
  const bool is_judged = judges(pruning, part);
  if (!pruning.uses_policy) {
    StepRule rule = scorer_rule(is_judged, threshold, sink);
    if (part == StepPart::draft) rule.part = part;
    return rule;
  }
  StepRule rule;
  rule.part = part;
  rule.question = question;
  rule.eviction = {threshold, sink, is_judged};
  return rule;
}

}  // namespace kvzap::engine
