// Choice of the next token from the logits.
#pragma once

#include <functional>
#include <kvzap/core/types.hpp>
#include <kvzap/engine/token_draw.hpp>
#include <kvzap/model/token_grammar.hpp>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace kvzap {

/// Options for choosing the next token.
struct SamplingOptions {
  /// 0: greedy. Otherwise logits are divided by the temperature.
  double temperature = 0;
  /// Keep the k most likely tokens; 0 keeps all.
  std::int64_t top_k = 0;
  /// Keep the smallest set of most likely tokens whose probabilities sum to at least top_p.
  double top_p = 1;
  std::uint64_t seed = 0;
  /// Keep the tokens with at least this fraction of the largest probability; 0 keeps all.
  double min_p = 0;

  // The options below change logits before all other options apply, in greedy decoding, too. They
  // depend on earlier tokens.

  /// For each token of the prompt and the answer, a positive logit is divided by this penalty and
  /// any other is multiplied by it; 1 changes nothing. As transformers' repetition_penalty.
  double repetition_penalty = 1;
  /// For each token of the answer, presence_penalty is subtracted from its logit once and
  /// frequency_penalty once per occurrence. The prompt does not count. As in OpenAI's API and vLLM.
  double presence_penalty = 0;
  double frequency_penalty = 0;
  /// The three penalties consider this many of the most recent tokens; 0: none, -1: all.
  std::int64_t repeat_last_n = -1;
  /// Tokens that are never drawn.
  std::vector<TokenId> suppress_tokens = {};
  /// Token sequences, none of them empty. The last token of a sequence is not drawn if the
  /// sequence's other tokens precede it. A sequence that is longer than the prompt and answer so
  /// far has no effect, as in transformers' bad_words_ids.
  std::vector<std::vector<TokenId>> bad_words = {};
  /// Tokens, and what is added to their logits. As OpenAI's logit_bias.
  std::vector<std::pair<TokenId, float>> logit_bias = {};
  /// Before the answer has min_new_tokens tokens, end_tokens are not drawn. As vLLM's min_tokens.
  std::int64_t min_new_tokens = 0;
  std::vector<TokenId> end_tokens = {};
  /// What the answer may be. Null: anything. end_tokens are drawn where the answer may end, and
  /// nowhere else.
  std::shared_ptr<const TokenGrammar> grammar = nullptr;

  /// Returns whether an option may change logits.
  bool changes_logits() const;
  /// Returns whether the next token is the one with the largest logit, so that no logits are
  /// needed.
  bool is_plain() const { return temperature == 0 && !changes_logits(); }
  /// Returns whether the next token depends on the logits and a random number alone, so that
  /// StepOutput::drawn may draw it.
  bool is_draw() const { return temperature > 0 && !changes_logits(); }
};

/// How an error names an option, given the name of its field.
using SamplingNames = std::function<std::string(std::string_view field)>;
/// Throws Error that names the option if one is NaN or out of range. The ranges are temperature >=
/// 0, top_k >= 0, top_p in (0, 1], min_p in [0, 1], and repetition_penalty in [1e-6, 1e6]. The
/// other penalties have a size of at most 1e6, and repeat_last_n is at least -1. Tokens in lists
/// must not be negative, and a bad word must not be empty. Biases are finite. `names`: absent
/// for the names of the fields.
void check(const SamplingOptions& options, const SamplingNames& names = {});

/// Draws tokens. Logits change in the order repetition penalty, frequency and presence penalty,
/// biases, bad words, suppressed tokens, tokens that end too early, tokens that the grammar
/// forbids. Filters apply in the order temperature, top-k, top-p, min-p. This is the order of
/// transformers, which has no frequency and presence penalties. The same seed gives the same draws
/// on every platform.
class Sampler {
 public:
  /// Throws Error as check does.
  explicit Sampler(const SamplingOptions& options);

  /// Appends tokens of the prompt, in parts or whole. Call it before any `append`.
  void append_prompt(const std::vector<TokenId>& tokens);
  /// Appends the next token of the answer. operator() does not append it. If the grammar forbids
  /// it, the next operator() throws: ranks without a grammar draw and append as well.
  void append(TokenId token);
  /// Whether the grammar lets no token follow, so that the answer is complete.
  bool is_complete() const;

  /// Returns the next token, given the model's own logits; ties give the smaller id. Returns -1 if
  /// a logit is NaN, the largest is not finite, or no token may be drawn. Throws Error if a grammar
  /// is too ambiguous, or has forbidden an earlier token.
  TokenId operator()(const std::vector<float>& original);
  /// Returns the next `count` draws of options with is_draw(), one after the other. The random
  /// numbers stay in place, as after operator() that returned -1.
  std::vector<TokenDraw> next_draws(std::size_t count) const;
  /// Uses up the random number of the first of next_draws.
  void use_draw();
  /// Applies the options to the logits, in float as in transformers: penalties, biases, and -inf
  /// for tokens that must not be drawn. Ids beyond the logits are ignored.
  void change(std::vector<float>& logits) const;

  /// Returns the state of the random numbers: the text that C++ defines for std::mt19937_64, which
  /// is the same on every platform. It does not include tokens.
  std::string state() const;
  /// Restores such a state. Throws Error and changes nothing if the text is not valid.
  void set_state(const std::string& state);

 private:
  struct Count {
    std::int64_t all = 0;
    std::int64_t answered = 0;
  };

  void take(TokenId token);
  void forbid_by_grammar(std::vector<float>& logits) const;
  TokenDraw draw_of(std::mt19937_64& random) const;

  SamplingOptions m_options;
  bool m_changes_logits = false;
  std::mt19937_64 m_random;
  std::optional<TokenGrammar::State> m_grammar;
  std::string m_failure;  // of the grammar; empty: none
  // Earlier tokens, with the prompt first. Empty if no option uses them.
  std::vector<TokenId> m_tokens;
  std::size_t m_prompt_tokens = 0;
  std::unordered_map<TokenId, Count> m_counts;  // of the tokens that penalties use
  std::vector<float> m_changed;                 // buffer of one call
};

}  // namespace kvzap
