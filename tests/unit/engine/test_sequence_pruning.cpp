#include "engine/sequence_pruning.hpp"

#include <gtest/gtest.h>

#include <algorithm>

namespace kvzap {
namespace {

using engine::EvictionMethod;
using When = engine::EvictionMoment::When;

std::shared_ptr<PolicyChoice> choice_of(const std::string& name) {
  auto choice = std::make_shared<PolicyChoice>();
  const auto& all = policies();
  choice->name = name;
  choice->info = &*std::find_if(all.begin(), all.end(),
                                [&](const PolicyInfo& info) { return info.name == name; });
  return choice;
}

std::shared_ptr<PolicyChoice> halved(const std::string& name, bool by_layer) {
  auto choice = choice_of(name);
  choice->budget.amount = Budget::Amount::evict_ratio;
  choice->budget.evict_ratio = 0.5;
  if (!by_layer) choice->budget.pool = Budget::Pool::model;
  return choice;
}

engine::SequencePruning pruning_of(const Pruning& pruning,
                                   const std::shared_ptr<const PolicyChoice>& policy) {
  return engine::SequencePruning({pruning, policy}, nullptr);
}

Pruning with_mode(PruneMode mode) {
  Pruning pruning;
  pruning.mode = mode;
  return pruning;
}

EvictionMethod method(const engine::SequencePruning& pruning, StepPart part,
                      std::int64_t tokens = 0, std::int64_t count = 8, std::int64_t steps = 0) {
  return plan_eviction(pruning, {When::step, part, count, tokens, steps}).method;
}

EvictionMethod method(const engine::SequencePruning& pruning, When when) {
  return plan_eviction(pruning, {when}).method;
}

TEST(EvictionPlan, NothingLeavesTheFullCache) {
  const auto full = pruning_of(with_mode(PruneMode::none), halved("knorm", true));
  for (const StepPart part : {StepPart::context, StepPart::whole, StepPart::question,
                              StepPart::generated, StepPart::held, StepPart::other}) {
    EXPECT_EQ(method(full, part), EvictionMethod::none);
  }
  EXPECT_EQ(method(full, When::context_held), EvictionMethod::none);
  EXPECT_EQ(method(full, When::context_read), EvictionMethod::none);
}

TEST(EvictionPlan, AThresholdJudgesPairsThatLeaveTheRing) {
  // Once by the engine's scorer, once by a policy.
  for (const auto& policy : {std::shared_ptr<PolicyChoice>(), choice_of("knorm")}) {
    const auto prefill = pruning_of(with_mode(PruneMode::prefill), policy);
    EXPECT_EQ(method(prefill, StepPart::context), EvictionMethod::append);
    EXPECT_EQ(method(prefill, StepPart::whole, 300), EvictionMethod::append);
    EXPECT_EQ(method(prefill, StepPart::question, 300), EvictionMethod::none);
    EXPECT_EQ(method(prefill, StepPart::generated, 300), EvictionMethod::none);
    const auto always = pruning_of(with_mode(PruneMode::always), policy);
    EXPECT_EQ(method(always, StepPart::context), EvictionMethod::append);
    EXPECT_EQ(method(always, StepPart::generated, 300), EvictionMethod::append);
    // A held context is judged once, at its end.
    EXPECT_EQ(method(always, StepPart::held), EvictionMethod::none);
    EXPECT_EQ(method(always, When::context_held), EvictionMethod::evict_by_cutoffs);
    EXPECT_EQ(method(always, When::context_read), EvictionMethod::evict_by_flags);
  }
}

TEST(EvictionPlan, ABudgetByLayerChoosesBeforeRowsAreStored) {
  const auto by_layer = pruning_of(with_mode(PruneMode::prefill), halved("knorm", true));
  EXPECT_EQ(method(by_layer, StepPart::context), EvictionMethod::append_kept);
  EXPECT_EQ(method(by_layer, StepPart::whole), EvictionMethod::append_kept);
  // A later part of the context competes with rows that are stored.
  EXPECT_EQ(method(by_layer, StepPart::context, 8), EvictionMethod::evict_by_flags);
  EXPECT_EQ(method(by_layer, StepPart::generated, 16), EvictionMethod::none);
  // What was read for several prunings ends without rows in rings, as append_kept does.
  const auto read = plan_eviction(by_layer, {When::context_read});
  EXPECT_EQ(read.method, EvictionMethod::evict_by_flags);
  EXPECT_TRUE(read.empties_ring);
  const auto of_model = pruning_of(with_mode(PruneMode::prefill), halved("knorm", false));
  EXPECT_EQ(method(of_model, StepPart::context), EvictionMethod::evict_by_flags);
  EXPECT_FALSE(plan_eviction(of_model, {When::context_read}).empties_ring);
}

TEST(EvictionPlan, APolicyThatRepeatsTheContextCutsAfterIt) {
  const auto kvzip = pruning_of(with_mode(PruneMode::prefill), halved("kvzip", true));
  EXPECT_EQ(method(kvzip, StepPart::context), EvictionMethod::none);
  EXPECT_EQ(method(kvzip, StepPart::generated, 8), EvictionMethod::none);
  const auto plan = plan_eviction(kvzip, {When::context_repeated});
  EXPECT_EQ(plan.method, EvictionMethod::evict_by_flags);
  EXPECT_FALSE(plan.empties_ring);
  EXPECT_EQ(plan.budget.evict_ratio, 0.5);
}

TEST(EvictionPlan, LaterCutsAreDueAfterSomeStepsOrALongQuestion) {
  Pruning pruning = with_mode(PruneMode::prefill);
  pruning.decode.every = 3;
  pruning.decode.keep = 40;
  const auto decode = pruning_of(pruning, halved("knorm", true));
  EXPECT_EQ(method(decode, StepPart::generated, 100, 1, 0), EvictionMethod::none);
  EXPECT_EQ(method(decode, StepPart::generated, 101, 1, 1), EvictionMethod::none);
  EXPECT_EQ(method(decode, StepPart::generated, 102, 1, 2), EvictionMethod::evict_by_flags);
  EXPECT_EQ(method(decode, StepPart::question, 100, 39, 0), EvictionMethod::none);
  EXPECT_EQ(method(decode, StepPart::question, 100, 40, 0), EvictionMethod::evict_by_flags);
  // The cut has an amount of its own.
  const auto plan = plan_eviction(decode, {When::step, StepPart::generated, 1, 102, 2});
  EXPECT_EQ(plan.budget.amount, Budget::Amount::keep_tokens);
  EXPECT_EQ(plan.budget.keep_tokens, 40);
}

}  // namespace
}  // namespace kvzap
