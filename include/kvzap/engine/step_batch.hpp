// The input of one step: spans of new tokens of any number of sequences.
#pragma once

#include <kvzap/core/cache.hpp>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/eviction.hpp>
#include <kvzap/engine/token_draw.hpp>
#include <vector>

namespace kvzap {

namespace engine {
struct PolicyStep;
}

/// The role of a span in its sequence. An engine with a policy acts according to it.
enum class StepPart {
  other,      // the policy ignores it
  context,    // the context, or a chunk of it
  question,   // a question about a context that was pruned before
  generated,  // a question about a context that is already pruned
  whole,      // context and question together; see StepRule::question
  held,       // a part of a context that is judged as a whole: by Engine::judge_context or, with
              // a policy, in the step of the last part, which is `context` (Engine::takes_parts)
  draft       // a generated token and guesses of those that follow it: Engine::take_back
};

/// The treatment of a span's new pairs and of the pairs that they push out of the ring.
struct StepRule {
  /// Score the new pairs with the scorer.
  bool score = false;
  /// Applied, after the step's attention, to every pair that leaves the ring.
  EvictionRule eviction;
  StepPart part = StepPart::other;
  /// Tokens of the question at the end of the span, for StepPart::whole.
  std::int64_t question = 0;
  /// More context follows a question or an answer. A policy that scores in every step then scores
  /// this one too, so that the next cut knows its rows.
  bool context_follows = false;
  /// The policy's part in this span; set by the engine. It must outlive the step.
  engine::PolicyStep* policy = nullptr;
};

/// The requested output for the token after a span's last token, or after each of its tokens; or
/// the hidden states that the output head would read.
enum class StepOutput {
  none,        // none: a chunk of a prompt that continues
  argmax,      // the token with the largest logit, on every rank; no logits leave a device
  logits,      // all logits, on rank 0
  all_logits,  // the logits after each token of the span, on rank 0
  all_argmax,  // the token with the largest logit after each token of the span, on every rank
  drawn,       // a token drawn as Span::draws says, with one rank; no logits leave a device
  all_drawn,   // such a token after each token of the span
  hidden,      // the last token's hidden state after the final norm, on rank 0
  all_hidden   // the same of each token of the span
};

/// Spans of consecutive new tokens of any length, each of another sequence. A batch can mix chunks
/// of prompts with single tokens of decoding sequences. All spans run through the model together
/// and read its weights once.
class StepBatch {
 public:
  /// The tokens of one sequence.
  struct Span {
    SequenceId sequence = -1;
    std::int64_t first = 0;  // row of its first token among all tokens of the step
    std::int64_t count = 0;
    StepRule rule;
    StepOutput output = StepOutput::argmax;
    /// Of StepOutput::drawn one, of all_drawn one for each token.
    std::vector<TokenDraw> draws = {};
  };

  StepBatch() = default;
  /// Makes a batch of one span.
  StepBatch(SequenceId sequence, const std::vector<TokenId>& tokens, const StepRule& rule,
            StepOutput output, const std::vector<TokenDraw>& draws = {}) {
    add(sequence, tokens, rule, output, draws);
  }

  /// Adds the next tokens of a sequence that is not in the batch yet. Throws Error if it is, if
  /// `tokens` is empty, or if `draws` has another size than the output needs.
  void add(SequenceId sequence, const std::vector<TokenId>& tokens, const StepRule& rule,
           StepOutput output, const std::vector<TokenDraw>& draws = {});
  /// Sets the policy of a span's rule.
  void set_policy(std::size_t span, engine::PolicyStep* policy) {
    m_spans.at(span).rule.policy = policy;
  }
  /// Removes all spans and keeps the allocated memory.
  void clear();

  const std::vector<Span>& spans() const { return m_spans; }
  /// Returns the tokens of all spans, one span after the other.
  const std::vector<TokenId>& tokens() const { return m_tokens; }

 private:
  std::vector<Span> m_spans;
  std::vector<TokenId> m_tokens;
};

/// The output of one span.
struct StepResult {
  /// The token with the largest logit; ties give the smaller id. -1 if a logit is NaN or the
  /// largest is not finite, and if it was not requested.
  TokenId argmax = -1;
  /// On rank 0 if requested, otherwise empty: (vocab_size), or with StepOutput::all_logits (tokens
  /// of the span, vocab_size).
  std::vector<float> logits;
  /// With StepOutput::all_argmax: `argmax` after each token of the span. Otherwise empty.
  std::vector<TokenId> all_argmax;
  /// On rank 0 if requested, otherwise empty: (hidden_size), or with StepOutput::all_hidden (tokens
  /// of the span, hidden_size).
  std::vector<float> hidden = {};
  /// The drawn token if requested; otherwise -1, and for the same reasons as `argmax`.
  TokenId drawn = -1;
  /// With StepOutput::all_drawn: `drawn` after each token of the span. Otherwise empty.
  std::vector<TokenId> all_drawn = {};

  /// Returns the result after token `index` of a span of `count` tokens, if outputs after all of
  /// them were requested.
  StepResult after(std::size_t index, std::size_t count) const;
};

/// Thrown if a rank had no memory for a step. Every rank throws it, and no sequence has changed on
/// any rank. The caller can retry after it has freed memory: a sequence, or pages by eviction.
class StepOutOfMemory : public AgreedOutOfMemory {
 public:
  using AgreedOutOfMemory::AgreedOutOfMemory;
};

/// Seconds that the host has spent on this rank so far.
struct PruneSeconds {
  double scoring = 0;  // by a scorer or policy
  double pruning = 0;  // choosing rows, and appending rows that an eviction rule judges
};

}  // namespace kvzap
