// What one step takes through the model: spans of new tokens of any number of sequences.
#pragma once

#include <kvzap/core/cache.hpp>
#include <kvzap/core/eviction.hpp>
#include <vector>

namespace kvzap {

struct PolicyStep;

/// Which part of a sequence's life a span is; an engine with a policy acts by it.
enum class StepPart {
  other,      // the policy has no part in it
  context,    // the context, or a chunk of it
  question,   // a question about a context that was pruned before
  generated,  // a token that the model has generated
  whole,      // context and question in one; see StepRule::question
  held        // a part of a context whose pairs are judged together: Engine::judge_context
};

/// What is to happen to the pairs of a span's tokens and to those they push out of the ring.
struct StepRule {
  /// Score the new pairs with the scorer.
  bool score = false;
  /// Applied, after the step's attention, to every pair that leaves the ring.
  EvictionRule eviction;
  StepPart part = StepPart::other;
  /// Tokens of the question at the end of the span, for StepPart::whole.
  std::int64_t question = 0;
  /// What a policy does to the sequence; set by the engine. Outlives the step.
  PolicyStep* policy = nullptr;
};

/// What a span asks of the token that follows its last one.
enum class StepOutput {
  none,    // nothing: a chunk of a prompt that goes on
  argmax,  // the token with the largest logit, on every rank; nothing else leaves a device
  logits   // all logits, on rank 0
};

/// Spans of consecutive new tokens, each of a sequence of its own and of any length: chunks of
/// prompts beside single tokens of sequences that decode. All of them go through the model together
/// and read its weights once.
class StepBatch {
 public:
  /// The tokens of one sequence.
  struct Span {
    SequenceId sequence = -1;
    std::int64_t first = 0;  // row of its first token among all of the step's
    std::int64_t count = 0;
    StepRule rule;
    StepOutput output = StepOutput::argmax;
  };

  StepBatch() = default;
  /// A batch of one span.
  StepBatch(SequenceId sequence, const std::vector<TokenId>& tokens, const StepRule& rule,
            StepOutput output) {
    add(sequence, tokens, rule, output);
  }

  /// Adds the next tokens of a sequence that is not in the batch yet. Throws Error if it is, or if
  /// there are none.
  void add(SequenceId sequence, const std::vector<TokenId>& tokens, const StepRule& rule,
           StepOutput output);
  /// Gives a span's rule a policy.
  void set_policy(std::size_t span, PolicyStep* policy) { m_spans.at(span).rule.policy = policy; }
  /// Forgets all spans and keeps their memory.
  void clear();

  const std::vector<Span>& spans() const { return m_spans; }
  /// Of all spans, one behind the other.
  const std::vector<TokenId>& tokens() const { return m_tokens; }

 private:
  std::vector<Span> m_spans;
  std::vector<TokenId> m_tokens;
};

/// What a span asked for.
struct StepResult {
  /// The smaller id of equal ones; -1 where a logit is NaN or the largest is not finite, and if it
  /// was not asked for.
  TokenId argmax = -1;
  /// (vocab_size) on rank 0 if asked for, else empty.
  std::vector<float> logits;
};

}  // namespace kvzap
