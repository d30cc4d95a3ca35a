// The pruning of one sequence, and the plan that follows from it at each moment.
#pragma once

#include <cstdint>
#include <kvzap/engine/pruning.hpp>
#include <kvzap/engine/step_batch.hpp>
#include <kvzap/engine/value_merger.hpp>

namespace kvzap::engine {

/// A pruning, and the component that scores for it in an engine.
struct SequencePruning : LoadedPruning {
  /// Whether the policy scores rows. Otherwise the engine's scorer does, if anything is pruned.
  bool uses_policy = false;

  /// `scorer`: the engine's, or null.
  SequencePruning(const LoadedPruning& loaded, const Scorer* scorer);
};

/// Returns whether a step of this part reads tokens of the context.
inline bool is_context(StepPart part) {
  return part == StepPart::context || part == StepPart::whole;
}

/// A moment at which rows of a sequence can leave the cache.
struct EvictionMoment {
  enum class When {
    step,              // tokens are appended
    context_held,      // a context whose steps had StepPart::held is complete
    context_repeated,  // the model has repeated the context
    context_read       // the sequence is a fork of a full one, whose scores are known
  };
  When when = When::step;
  /// Of a step: its part, its tokens, those that the sequence has seen before, and the steps since
  /// the context or the last cut.
  StepPart part = StepPart::other;
  std::int64_t count = 0, tokens = 0, steps = 0;
  /// Of a step with StepPart::context: it is the last part of a context that a policy takes in
  /// parts.
  bool ends_parts = false;
};

/// The function of KVCache through which rows leave.
enum class EvictionMethod {
  none,             // no row leaves
  append,           // a threshold judges pairs as they leave the ring
  append_kept,      // a budget chooses from a layer's first rows before they are stored
  evict_by_flags,   // rows are chosen from all that are stored, by a budget or a threshold
  evict_by_cutoffs  // a threshold judges all rows that are stored, by their stored scores
};

/// How rows leave at a moment.
struct EvictionPlan {
  EvictionMethod method = EvictionMethod::none;
  /// For append_kept and evict_by_flags. Policies see it in each step that can lead to a cut.
  Budget budget;
  /// evict_by_flags leaves no row in a ring.
  bool empties_ring = false;
  /// The step follows the context, and cuts may be due.
  bool is_in_decode = false;
  /// In place of the choice's merger: Policy::context_merger.
  MergerMaker merger = {};
};

/// Decides how rows leave the cache: the only place that chooses between KVCache's functions.
EvictionPlan plan_eviction(const SequencePruning& pruning, const EvictionMoment& moment);

/// Returns the rule of a step that the engine's scorer judges.
StepRule scorer_rule(bool judges, float threshold, std::int64_t sink);

/// Returns the rule of a step that reads `part`. `question`: number of tokens at its end that
/// belong to the question.
StepRule rule_of(const SequencePruning& pruning, StepPart part, std::int64_t question);

}  // namespace kvzap::engine
