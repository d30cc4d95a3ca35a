// The tokens of one answer: how the next one is drawn, and when the answer ends.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>
#include <kvzap/engine/prompt_lookup.hpp>
#include <kvzap/engine/sampler.hpp>
#include <kvzap/engine/step_batch.hpp>
#include <optional>
#include <string_view>
#include <vector>

namespace kvzap {

/// When an answer ends.
struct StopRules {
  std::int64_t max_new_tokens = 128;
  /// The answer ends with the first of these ids, which becomes its last token.
  std::vector<TokenId> stop_ids;
  /// The answer ends at this number of positions of its sequence. 0: no limit.
  std::int64_t max_tokens = 0;
};

/// Why an answer ends: by itself (an id of stop_ids, the end of its grammar, a stop text), the
/// requested number of tokens, or no free position.
enum class StopReason { stop_id, max_new_tokens, context_full };
/// "stop_id", "max_new_tokens" or "context_full".
std::string_view name_of(StopReason reason);

/// One answer as it is generated. It draws tokens and keeps them; the caller runs them.
class Continuation {
 public:
  /// `lookup`: the most tokens of a draft; 0: there are no drafts. Throws Error as
  /// check(SamplingOptions) does.
  Continuation(const SamplingOptions& sampling, StopRules rules, std::int64_t lookup = 0);

  /// Appends tokens of the prompt, in parts or whole. Call it before any `append`.
  void append_prompt(const std::vector<TokenId>& tokens);

  /// What a step must return for `draw`. `may_draw`: whether steps draw tokens
  /// (Engine::draws_tokens).
  StepOutput output(bool may_draw = false) const;
  /// Returns the draws of a step with this output after each of `tokens` tokens, or after the last.
  /// Empty unless the output is drawn or all_drawn.
  std::vector<TokenDraw> draws(StepOutput output, std::size_t tokens = 1) const;
  /// Returns the next token, given the result of the step before it; does not append it. Returns -1
  /// if logits are not finite, or if no token may be drawn. Throws Error if a grammar is too
  /// ambiguous.
  TokenId draw(const StepResult& result);
  void append(TokenId token);
  const std::vector<TokenId>& tokens() const { return m_tokens; }

  /// Returns guesses of the tokens after the last one (PromptLookup): at most `most`, and no more
  /// than may follow. `positions`: as in `end`. A caller that runs them together with the last
  /// token draws after each, as long as the token drawn is the guess.
  std::vector<TokenId> draft(std::int64_t positions, std::int64_t most);
  /// Tells how many tokens of the draft were drawn, too.
  void judge_draft(std::int64_t accepted) { m_lookup.judge(accepted); }
  const DraftCounts& drafts() const { return m_lookup.counts(); }

  /// Returns why the answer ends here, or nothing if it continues. `positions`: of the sequence
  /// before its last token runs. The last token that fits still gets a successor, but that
  /// successor does not run.
  std::optional<StopReason> end(std::int64_t positions) const;
  /// Whether the answer ends with its last token for a reason that only its text shows: `append`
  /// sets it at the end of a grammar. Where other ranks decide, set theirs.
  bool is_complete() const { return m_is_complete; }
  void set_complete(bool value) { m_is_complete = value; }

  /// The random numbers; see Sampler::state.
  std::string random_state() const { return m_sampler.state(); }
  void set_random_state(const std::string& state) { m_sampler.set_state(state); }

 private:
  Sampler m_sampler;
  PromptLookup m_lookup;
  bool m_is_plain, m_is_draw;
  StopRules m_rules;
  std::vector<TokenId> m_tokens;
  bool m_is_complete = false;
};

/// Returns the natural logarithm of the sum of exponentials of `logits` (vocabulary): a logit less
/// this is the log probability of its token. NaN if a logit is NaN.
double log_normalizer(const float* logits, std::int64_t vocabulary);

}  // namespace kvzap
